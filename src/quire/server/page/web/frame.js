// The frame: status line, theme, tabs.

import {$, emit, tab} from "./dom.js";

const THEMES = ["auto", "light", "dark"];

export function tell(kind, text) {
  const status = $("status");
  if (status.textContent !== text) status.textContent = text;
  status.dataset.kind = kind;
}

function wear(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  $("theme").textContent = "◐ " + theme;
  $("theme").setAttribute("aria-label", `◐ ${theme}: colours of the page`);
  tab.set("theme", theme);
  emit("paint");
}

export function startFrame() {
  $("theme").onclick = () => wear(THEMES[(THEMES.indexOf(tab.get("theme") || "auto") + 1) % THEMES.length]);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => emit("paint"));
  for (const button of $("tabs").children) {
    button.onclick = () => {
      document.body.dataset.tab = button.dataset.to;
      for (const other of $("tabs").children) other.setAttribute("aria-pressed", String(other === button));
      emit("paint");
    };
  }
  wear(tab.get("theme") || "auto");
}
