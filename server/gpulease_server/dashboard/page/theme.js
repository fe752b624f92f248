// Light, dark, or as the system has it: kept in this browser.

import { ofDevice } from "./storage.js";

const THEME = "gpulease-theme";
export const THEMES = ["auto", "light", "dark"];

/** The theme that was chosen. */
export function theme() {
  const kept = ofDevice.getItem(THEME) ?? "auto";
  return THEMES.includes(kept) ? kept : "auto";
}

/** Choose a theme, and keep it. */
export function setTheme(name) {
  if (name === "auto") ofDevice.removeItem(THEME);
  else ofDevice.setItem(THEME, name);
  applyTheme();
}

/** Show the page in the theme that was chosen. */
export function applyTheme() {
  document.documentElement.dataset.theme = theme();
}

/** Whether the page is dark at this moment. */
export function isDark() {
  return theme() === "dark" || (theme() === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
}
