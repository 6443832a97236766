// What the pages do better with a script: they renew themselves, search while one types, copy commands. Without it they work as they are.
"use strict";
(() => {
  const page = document.documentElement;
  page.classList.add("script");
  const fresh = document.querySelector("[data-fresh]");
  let asked = 0;
  let failing = false;

  const busy = () => document.hidden || String(window.getSelection()) !== "" || document.activeElement?.matches("input, button");

  async function renew(url, keep) {
    const mine = ++asked;
    try {
      const answer = await fetch(url, { headers: { Accept: "text/html" }, cache: "no-store" });
      if (!answer.ok) throw new Error(answer.status);
      const text = await answer.text();
      if (mine !== asked || (keep && busy())) return;
      const next = new DOMParser().parseFromString(text, "text/html");
      const typed = document.activeElement?.matches("input[type=search]");
      for (const part of typed ? [".chips", ".list", ".pager"] : ["#main", "footer"]) {
        const now = document.querySelector(part);
        const then = next.querySelector(part);
        if (now && then) now.replaceWith(then);
        else if (then && part === ".list") document.querySelector(".chips").after(then);
        else if (now && !then) now.remove();
      }
      document.title = next.title;
      failing = false;
      ready();
    } catch {
      if (mine === asked) failing = true;
    }
    if (fresh) fresh.textContent = failing ? "no answer; trying again" : "";
  }

  function ready() {
    for (const button of document.querySelectorAll("[data-copy]")) {
      button.hidden = false;
      button.onclick = () => copy(button);
    }
    const form = document.querySelector("[data-search]");
    if (form && !form.dataset.live) {
      form.dataset.live = "1";
      let timer;
      form.addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(() => {
          const url = "?" + new URLSearchParams(new FormData(form));
          history.replaceState(null, "", url);
          renew(url, false);
        }, 200);
      });
    }
  }

  async function copy(button) {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      // No clipboard for pages that come over plain HTTP: the text is selected, to be copied by hand.
      const range = document.createRange();
      range.selectNodeContents(code);
      const chosen = window.getSelection();
      chosen.removeAllRanges();
      chosen.addRange(range);
      if (!document.execCommand("copy")) return;
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; button.blur(); }, 1500);
  }

  const seconds = Number(document.querySelector("[data-refresh]")?.dataset.refresh || 0);
  if (seconds) setInterval(() => { if (!busy()) renew(location.href, true); }, 1000 * seconds);
  ready();
})();
