// The bases of projection methods: importances and ranks, layer by layer.

/** A part that shows one method's layers; `build(method)` returns what to put below the choice. */
function layersPart(methods, part, title, note, has, build) {
  const able = methods.filter((method) => method.layers.some(has));
  if (!able.length) return false;
  const body = make("div", {});
  const update = (place) => {
    body.replaceChildren(...build(methods[Number(place)]));
  };
  const best = [...bestFew(able)][0];
  const list = choice("method", methodOptions(able), update, String(best));
  part.append(make("h3", {}, title),
    make("div", { class: "controls" }, able.length > 1 ? list.element : able[0].name), body,
    make("p", { class: "note" }, note));
  update(best);
  return true;
}

function importances(section, methods, part) {
  const bands = [[0, 10, 0.1], [1, 9, 0.14], [3, 7, 0.22]];
  const one = (layer) => {
    const chart = new LineChart(`Importances of ${layer.name} at the end of each task`);
    const decile = (number) => layer.deciles.map((values) => values && values[number]);
    const named = [[10, "largest λ"], [9, "90 %"], [5, "median"], [1, "10 %"], [0, "smallest"]];
    const rows = (at) => named.map(([number, name]) => [null, name, fixed(layer.deciles[at][number], 3)]);
    chart.update({
      x: section.tasks.map((_, place) => place + 1),
      whole: true,
      xTitle: "tasks learned",
      yTitle: layer.name,
      height: 230,
      domain: [0, 1.02],
      title: (at) => `at the end of task ${at + 1}`,
      series: [{
        name: "λ",
        place: 0,
        y: decile(5),
        bands: bands.map(([low, high, opacity]) => ({ low: decile(low), high: decile(high), opacity })),
        rows,
      }],
    });
    return chart.host;
  };
  return layersPart(methods, part, "Importances of the bases, by layer",
    "λ of each layer’s basis vectors at the end of each task, for the basis the task was learned with (SGP: the extended "
    + "basis): median, and bands with the middle 40 %, 80 % and all of them; deciles averaged over seeds. A direction is "
    + "fixed at 1 and free at 0.",
    (layer) => layer.deciles,
    (method) => [make("div", { class: "multiples" }, ...method.layers.filter((layer) => layer.deciles).map(one))]);
}

function ranks(section, methods, part) {
  const build = (method) => {
    const chart = new LineChart(`Ranks of the bases of ${method.name} after each task. Arrow keys read out values.`);
    const layers = method.layers.filter((layer) => layer.rank);
    const share = (layer) => layer.rank.map((rank) => (known(rank) ? (100 * rank) / layer.of : null));
    chart.update({
      x: section.tasks.map((_, place) => place + 1),
      whole: true,
      xTitle: "tasks learned",
      yTitle: "rank of the basis, percent of the layer’s inputs",
      height: 300,
      domain: [0, 100],
      title: (at) => `after task ${at + 1}`,
      series: layers.map((layer, place) => ({
        name: layer.name,
        place,
        y: share(layer),
        text: (at) => `${significant(layer.rank[at])} of ${layer.of}`,
      })),
    });
    const key = layers.map((layer, place) => make("span", {}, swatch(place), layer.name));
    return [make("div", { class: "key" }, ...key), chart.host];
  };
  return layersPart(methods, part, "Ranks of the bases",
    "Number of directions of each layer’s inputs in memory after each task, for learning the next one; mean over seeds.",
    (layer) => layer.rank, build);
}
