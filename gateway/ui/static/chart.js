// The chart of tokens a second, drawn by uPlot in the colours of the page.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const element = document.getElementById("series");
  if (!element) return;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let data = JSON.parse(element.dataset.series);
  let chart = null;

  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const size = () => ({ width: element.clientWidth, height: element.clientHeight });
  const compact = new Intl.NumberFormat("en", { notation: "compact" });

  function draw() {
    if (chart) chart.destroy();
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false } };
    const font = "12px " + getComputedStyle(document.body).fontFamily;
    const accent = colour("--accent");
    chart = new uPlot({
      ...size(),
      legend: { show: false },
      cursor: { show: false },
      padding: [8, 12, 0, 0],
      scales: { y: { range: (_chart, _low, high) => [0, Math.max(10, high * 1.1)] } },
      axes: [
        { ...axis, font, size: 28, incrs: [60], values: (_chart, ticks) => ticks.map((at) => new Date(at * 1000).toISOString().slice(11, 16)) },
        { ...axis, font, size: 48, values: (_chart, ticks) => ticks.map((value) => compact.format(value)) },
      ],
      series: [
        {},
        { label: "prompts", stroke: colour("--wait"), width: 1.5, points: { show: false } },
        { label: "output", stroke: accent, width: 2, fill: accent + "1f", points: { show: false } },
      ],
    }, data, element);
  }

  sluice.part("series", (text) => { data = JSON.parse(text); chart.setData(data); });
  dark.addEventListener("change", draw);
  new ResizeObserver(() => { if (chart) chart.setSize(size()); }).observe(element);
  draw();
});
