// The text of a job as it comes, and buttons that copy.
"use strict";

(() => {
  const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
  const UNSEEN = /[\u0080-\u009f\u202a-\u202e\u2066-\u2069]/g;
  const SPARE_PX = 40;

  const picture = (one) => one === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + one.charCodeAt(0));
  const visible = (text) => text.replace(CONTROL, picture).replace(UNSEEN, "\ufffd");

  sluice.on("output", (entry) => {
    const element = document.getElementById("choice-" + entry.choice);
    const isAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < SPARE_PX;
    element.append(visible(entry.text));
    if (isAtEnd) element.scrollTop = element.scrollHeight;
  });

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) return;
    const element = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(element.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(element);
      button.textContent = "Selected: press Ctrl-C";
    }
  });
})();
