// Runs in each of MLflow's pages before MLflow does; `ours` has the addresses and charts of local_pages.py.
{
  const set = {"mlflow.assistant.panelOpen_v1": false, "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": true,
    "mlflow.telemetry.info.alert.dismissed_v1": true, "mlflow.settings.telemetry.enabled_v1": false};
  for (const key in set) if (localStorage.getItem(key) === null) localStorage.setItem(key, set[key]);

  if (ours.runs && /^(#\/?)?$/.test(location.hash)) location.replace(ours.runs);

  // The charts of a run's page are in the local storage, by the run. MLflow's own, which stand in for those that
  // nobody has arranged, are one section per prefix of the metrics' names, all unfolded.
  const stored = Storage.prototype.getItem;
  Storage.prototype.getItem = function (key) {
    const run = /-RunPage-([0-9a-f]{32})-model-chartUIState$/.exec(key);
    return stored.call(this, key) ?? (run && arranged(run[1]));
  };

  function arranged(run) {
    const request = new XMLHttpRequest();
    request.open("GET", `ajax-api/2.0/mlflow/runs/get?run_id=${run}`, false);
    request.send();
    const metrics = JSON.parse(request.responseText).run?.data.metrics ?? [];
    if (!metrics.length) return null;
    const curves = metrics.filter(one => one.step > 0).map(one => one.key);
    const values = metrics.map(one => one.key).filter(name => !curves.includes(name));
    const first = ours.first.filter(name => curves.includes(name));
    const parts = [["PPO", first], ["Curves", curves.filter(name => !first.includes(name))], ["Single values", values]];
    const shown = parts.filter(([, names]) => names.length);
    return JSON.stringify({
      isAccordionReordered: true,
      autoRefreshEnabled: true,
      compareRunSections: shown.map(([name], at) => ({...ours.section, uuid: name, name, display: at === 0})),
      compareRunCharts: shown.flatMap(([section, names]) => names.map(name => ({
        ...ours.chart, uuid: name, metricSectionId: section, metricKey: name, selectedMetricKeys: [name],
        type: section === "Single values" ? "BAR" : "LINE", displayName: name,
      }))),
    });
  }
}
