// The text of a job as it comes, and buttons that copy.
"use strict";

(() => {
  const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f]/g;
  const UNSEEN = /[\u0080-\u009f\u202a-\u202e\u2066-\u2069]/g;
  const SPARE_PX = 40;

  const picture = (one) => one === "\u007f" ? "\u2421" : String.fromCharCode(0x2400 + one.charCodeAt(0));
  const visible = (text) => text.replace(CONTROL, picture).replace(UNSEEN, "\ufffd");

  const TITLES = { content: "Answer", reasoning: "Reasoning", call: "Call of " };
  const kinds = new Map();

  const add = (element, text) => {
    const isAtEnd = element.scrollHeight - element.scrollTop - element.clientHeight < SPARE_PX;
    element.append(visible(text));
    if (isAtEnd) element.scrollTop = element.scrollHeight;
  };

  // Text with marks is shown twice: its parts, and as it is in a fold below them.
  const fold = (element) => {
    if (element.closest("details")) return;
    const details = document.createElement("details");
    const summary = document.createElement("summary");
    summary.textContent = "As the model wrote it";
    element.replaceWith(details);
    details.append(summary, element);
  };

  const begin = (parts, title) => {
    const section = document.createElement("section");
    const heading = document.createElement("p");
    const text = document.createElement("pre");
    heading.className = "small muted";
    heading.textContent = title;
    text.className = "output is-part";
    text.tabIndex = 0;
    text.setAttribute("role", "region");
    text.setAttribute("aria-label", title);
    section.append(heading, text);
    parts.append(section);
  };

  const addPart = (choice, part) => {
    const parts = document.getElementById("parts-" + choice);
    const isCall = part.kind === "call";
    if (isCall || (part.kind !== "arguments" && kinds.get(choice) !== part.kind)) {
      begin(parts, TITLES[part.kind] + (isCall ? visible(part.text) : ""));
    }
    kinds.set(choice, part.kind);
    if (!isCall) add(parts.lastElementChild.lastElementChild, part.text);
  };

  sluice.on("output", (entry) => {
    const element = document.getElementById("choice-" + entry.choice);
    if (entry.parts) fold(element);
    for (const part of entry.parts || []) addPart(entry.choice, part);
    add(element, entry.text);
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
