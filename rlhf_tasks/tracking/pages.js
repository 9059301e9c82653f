// Runs in MLflow's page before MLflow does. `ours` has the address and the charts of local_pages.py.
{
  // 1. What MLflow remembers of a user's choices, for users who have made none.
  const chosen = {
    "mlflow.workflowType_v1": "machine_learning", // or pages of a run have the menu of prompts and traces
    "mlflow.assistant.panelOpen_v1": false,
    "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": true,
    "mlflow.telemetry.info.alert.dismissed_v1": true,
    "mlflow.settings.telemetry.enabled_v1": false,
  };
  for (const [key, value] of Object.entries(chosen))
    if (localStorage.getItem(key) === null) localStorage.setItem(key, JSON.stringify(value));

  // 2. The root goes to the page of runs, and a link to a run goes to its charts.
  if (ours.runs && /^(#\/?)?$/.test(location.hash)) location.replace(ours.runs);
  addEventListener("click", event => {
    const link = event.target.closest("a[href]:not([role=tab], [role=tab] *)");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    if (!/^#\/experiments\/\d+\/runs\/[0-9a-f]{32}$/.test(link.getAttribute("href"))) return;
    event.preventDefault();
    event.stopPropagation();
    location.hash = `${link.getAttribute("href")}/model-metrics`;
  }, true);

  // 3. The charts of a run's page. Those that nobody has arranged MLflow draws as a section for each prefix of
  // the metrics' names, all unfolded.
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
    const curves = metrics.filter(one => one.step > 0).map(one => one.key);
    const first = ours.first.filter(name => curves.includes(name));
    const parts = Object.entries({
      "PPO": first,
      "Curves": curves.filter(name => !first.includes(name)),
      "Single values": metrics.map(one => one.key).filter(name => !curves.includes(name)),
    }).filter(([, names]) => names.length);
    return parts.length ? JSON.stringify({
      isAccordionReordered: true,
      autoRefreshEnabled: true,
      compareRunSections: parts.map(([part], at) => ({...ours.section, uuid: part, name: part, display: !at})),
      compareRunCharts: parts.flatMap(([part, names]) => names.map(name => ({
        ...ours.chart, uuid: name, metricSectionId: part, metricKey: name, selectedMetricKeys: [name],
        displayName: name, type: part === "Single values" ? "BAR" : "LINE",
      }))),
    }) : null;
  }
}
