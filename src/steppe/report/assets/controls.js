// Controls: choices, sliders, tabs, light and dark mode.

/** A labeled select; `options` are [value, text]. */
function choice(words, options, changed, selected = null) {
  const list = make("select", { change: () => changed(list.value) },
    ...options.map(([value, text]) => make("option", { value, selected: value === selected }, text)));
  return { element: make("label", {}, words, list), list };
}

function tick(words, checked, changed) {
  const box = make("input", { type: "checkbox", checked, change: () => changed(box.checked) });
  return make("label", {}, box, words);
}

function slider(words, count, at, changed) {
  const moved = () => changed(Number(range.value));
  const range = make("input", { type: "range", min: 1, max: count, step: 1, value: at, input: moved });
  return { element: make("label", {}, words, range), range };
}

/** Checkboxes to choose methods, which also serve as the legend. */
function methodBoxes(methods, chosen, changed) {
  const boxes = methods.map(({ name, place }) => {
    const box = make("input", {
      type: "checkbox",
      checked: chosen.has(place),
      change: () => {
        if (box.checked) chosen.add(place);
        else chosen.delete(place);
        changed();
      },
    });
    return { box, place, label: make("label", {}, box, swatch(place), make("span", {}, name)) };
  });
  const all = (on) => () => {
    for (const { box, place } of boxes) {
      box.checked = on;
      if (on) chosen.add(place);
      else chosen.delete(place);
    }
    changed();
  };
  const pick = make("span", { class: "pick" },
    make("button", { type: "button", class: "quiet", click: all(true) }, "all"),
    make("button", { type: "button", class: "quiet", click: all(false) }, "none"));
  return make("fieldset", { class: "methods" },
    make("legend", {}, "methods"), ...boxes.map(({ label }) => label), methods.length > 3 ? pick : null);
}

/** Turns the links to sections into tabs that show one section at a time. */
function makeTabs() {
  const bar = document.querySelector("nav.tabs");
  if (!bar) return;
  const panels = [...document.querySelectorAll("section.benchmark")];
  const list = make("div", { class: "tabs", role: "tablist", "aria-label": "Benchmarks" });
  const show = (chosen, focus) => {
    buttons.forEach((button, place) => {
      button.setAttribute("aria-selected", String(place === chosen));
      button.tabIndex = place === chosen ? 0 : -1;
      panels[place].hidden = place !== chosen;
    });
    if (focus) buttons[chosen].focus();
  };
  const buttons = panels.map((panel, place) => {
    panel.setAttribute("role", "tabpanel");
    return make("button", {
      type: "button",
      role: "tab",
      "aria-controls": panel.id,
      click: () => show(place, false),
      keydown: (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (step) show((place + step + panels.length) % panels.length, true);
      },
    }, panel.querySelector("h2").textContent);
  });
  list.append(...buttons);
  bar.replaceWith(list);
  const linked = panels.findIndex((panel) => `#${panel.id}` === window.location.hash);
  show(Math.max(0, linked), false);
}

/** Light or dark mode: the system's preference until this button is used. */
function makeThemeSwitch() {
  const button = document.getElementById("theme");
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const name = () => {
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", dark() ? "Switch to light mode" : "Switch to dark mode");
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  system.addEventListener("change", name);
  button.hidden = false;
  name();
}

/** The reference of the table of differences: all tables are on the page, one is visible. */
function makeReferenceChoice(part) {
  const list = part.querySelector("select");
  const show = () => {
    for (const body of part.querySelectorAll("tbody")) body.hidden = body.dataset.reference !== list.value;
  };
  list.addEventListener("change", show);
  show();
}
