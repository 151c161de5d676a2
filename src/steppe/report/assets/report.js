// From the data on the page to its drawn parts.

const PARTS = { curves, matrix, landscape, costs, importances, ranks };

const report = JSON.parse(document.getElementById("data").textContent);
document.documentElement.classList.add("has-script");
makeThemeSwitch();
makeTabs();
for (const [number, section] of report.entries()) {
  const place = document.querySelector(`[data-section="${number}"]`);
  const methods = section.methods.map((method, order) => ({ ...method, place: order }));
  for (const [name, build] of Object.entries(PARTS)) {
    const part = place.querySelector(`[data-part="${name}"]`);
    part.hidden = !build(section, methods, part);
  }
  const differences = place.querySelector('[data-part="differences"]');
  if (differences) makeReferenceChoice(differences);
}
