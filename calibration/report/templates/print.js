addEventListener("beforeprint", () => {
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    Plotly.relayout(chart, {width: Math.min(chart.clientWidth, 660)});
  }
});
addEventListener("afterprint", () => {
  for (const chart of document.querySelectorAll(".js-plotly-plot")) {
    Plotly.relayout(chart, {width: null, autosize: true});
  }
});
