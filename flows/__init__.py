"""Prefect: when, where and with what care stages run. No torch here. The path of a click on `Run`:

1. `deployments` has registered the flow; a worker (`service`, `worker`) starts a process for the run.
2. `pipeline.pipeline` checks the form (`form`), and `run_folder` opens a workspace (project/workspaces).
3. `pipeline.run_stages` takes GPU slots (`slots`) and calls a task per stage (`stage_tasks`).
4. `subprocesses.run` starts `dvc repro --single-item STAGE` as a process group, and passes signals on.
5. DVC compares the stage with dvc.lock and runs its `cmd` of dvc.yaml, `rlhf STAGE`: cli/main.
6. `stages/runner` gives the stage its section of params.yaml, `training/launch` its ranks.
7. The stage itself, such as `stages/ppo`, trains. `promotion` and `results` follow in the flow.
"""
