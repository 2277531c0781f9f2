// The question that is being written stays in this tab until it is asked, also when its page is left.
"use strict";

document.addEventListener("DOMContentLoaded", () => {
  const form = document.getElementById("ask");
  if (!form) return;
  const field = form.elements.prompt;
  const name = "question " + form.elements.csrf.value;

  function keep() {
    try {
      sessionStorage.setItem(name, field.value);
    } catch { /* it is larger than a tab may keep */ }
  }

  for (const other of Object.keys(sessionStorage)) if (other !== name) sessionStorage.removeItem(other);
  if (field.value) keep();
  else field.value = sessionStorage.getItem(name) ?? "";
  field.addEventListener("input", keep);
  form.addEventListener("submit", () => sessionStorage.removeItem(name));
});
