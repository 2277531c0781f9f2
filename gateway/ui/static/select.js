// Ticking a job unticks "all", and the other way round.
"use strict";

document.addEventListener("change", (event) => {
  const form = event.target.closest("form[data-select]");
  if (!form || event.target.type !== "checkbox") return;
  const all = form.querySelector("[data-all]");
  const jobs = [...form.querySelectorAll("input[name=job]")];
  if (event.target === all) { if (all.checked) for (const job of jobs) job.checked = false; }
  else all.checked = !jobs.some((job) => job.checked);
});
