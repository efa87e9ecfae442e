// Light, dark, or as the system has it; remembered in this browser.

import { byId, el, svg } from "./dom.js";

const NAME = "halfmoon-theme";
const NEXT = { system: "light", light: "dark", dark: "system" };
const LOOKS = {
  system: ["as the system", "M12 3a9 9 0 0 1 0 18z"],
  light: ["light", "M12 7a5 5 0 1 1 0 10 5 5 0 0 1 0-10z"],
  dark: ["dark", "M15 4a8.5 8.5 0 1 0 5 12A7 7 0 0 1 15 4z"],
};

export function startTheme() {
  const button = byId("theme");
  const show = (theme) => {
    if (theme === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    const [name, path] = LOOKS[theme];
    button.setAttribute("aria-label", `Colours: ${name}`);
    button.title = `Colours: ${name}`;
    button.replaceChildren(
      svg(
        "svg",
        { viewBox: "0 0 24 24", width: 18, height: 18, "aria-hidden": "true" },
        theme === "dark" ? null : svg("circle", { cx: 12, cy: 12, r: 9, class: "ring" }),
        svg("path", { d: path, class: "disc" }),
      ),
      el("span", { class: "wide-only" }, name === "as the system" ? "system" : name),
    );
  };
  let theme = localStorage.getItem(NAME) ?? "system";
  if (!(theme in LOOKS)) theme = "system";
  show(theme);
  button.addEventListener("click", () => {
    theme = NEXT[theme];
    localStorage.setItem(NAME, theme);
    show(theme);
  });
}
