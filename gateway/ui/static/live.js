// One connection a page: it is closed while the page is hidden, and resumed where it was.
"use strict";

(() => {
  const RETRY_MS = 2000;
  const handlers = {};
  let source = null;
  let position = "";
  let isOver = false;

  const main = document.querySelector("main[data-live]");
  const status = document.getElementById("live");

  function say(state, words) {
    if (status && status.dataset.state !== state) {
      status.dataset.state = state;
      status.textContent = words;
    }
  }

  function show(parts) {
    for (const [id, html] of Object.entries(parts)) {
      const element = document.getElementById(id);
      if (!element) continue;
      if (handlers[id]) handlers[id](html, element);
      else if (!element.contains(document.activeElement) || !element.matches("[data-keep]")) element.innerHTML = html;
    }
    document.dispatchEvent(new CustomEvent("sluice:shown"));
  }

  function open() {
    if (!main || source || isOver || document.hidden) return;
    const url = new URL(main.dataset.live, location.href);
    if (position) url.searchParams.set("after", position);
    const opened = new EventSource(url);
    source = opened;
    opened.onopen = () => say("live", "live");
    opened.onerror = () => {
      say("lost", "reconnecting");
      if (opened.readyState === EventSource.CLOSED) {
        close();
        refused(url);
      }
    };
    opened.addEventListener("parts", (event) => { say("live", "live"); show(JSON.parse(event.data)); });
    opened.addEventListener("lost", () => say("lost", "no answer"));
    opened.addEventListener("error", (event) => { if (event.data) { close(); setTimeout(open, RETRY_MS); } });
    // The gateway stops, or the key was revoked: the page is asked for again, which may lead to the sign-in.
    opened.addEventListener("over", () => { close(); say("lost", "reconnecting"); setTimeout(check, RETRY_MS); });
    opened.addEventListener("end", (event) => { show(JSON.parse(event.data)); isOver = true; close(); say("over", "complete"); });
    for (const [name, act] of Object.entries(listeners)) {
      opened.addEventListener(name, (event) => {
        if (event.lastEventId) position = event.lastEventId;
        act(JSON.parse(event.data));
      });
    }
  }

  function close() {
    if (source) source.close();
    source = null;
  }

  // An EventSource does not say why it was refused.
  async function refused(url) {
    let wait = RETRY_MS;
    try {
      const answer = await fetch(url, { method: "HEAD", headers: { accept: "text/event-stream" } });
      if (answer.status === 401) return location.reload();
      if (answer.status === 429) {
        wait = 1000 * Number(answer.headers.get("retry-after"));
        say("wait", "paused: too many pages are open");
      }
    } catch { /* the gateway is away */ }
    setTimeout(open, wait);
  }

  async function check() {
    try {
      const answer = await fetch(location.href, { redirect: "manual" });
      if (answer.type === "opaqueredirect" || answer.status === 401) location.reload();
      else open();
    } catch {
      setTimeout(check, RETRY_MS);
    }
  }

  const listeners = {};
  window.sluice = {
    part: (id, act) => { handlers[id] = act; },
    on: (name, act) => { listeners[name] = act; },
  };

  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { close(); say("wait", "paused"); } else open();
  });
  addEventListener("pagehide", close);
  addEventListener("pageshow", open);
  document.addEventListener("DOMContentLoaded", open);
})();
