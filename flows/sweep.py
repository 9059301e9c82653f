"""placeholder"""

from prefect import flow


@flow(name="rlhf-sweep")
def sweep() -> None: ...
