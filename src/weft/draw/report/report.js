// Shows values under the pointer. The points are read from the curves, so that the page contains them only once.
"use strict";
for (const svg of document.querySelectorAll("svg.curves")) {
  const plot = svg.parentElement;
  const add = (parent, className) => {
    const element = document.createElement("div");
    element.className = className;
    return parent.appendChild(element);
  };
  const overlay = add(plot, "overlay");
  const guide = add(overlay, "guide"), tip = add(overlay, "tip");
  const ends = (name) => svg.dataset[name].split(" ").map(Number);
  const [left, right] = ends("x"), [low, high] = ends("y");
  const text = (value, range) => {  // as many digits as the chart resolves
    const digits = Math.min(9, Math.max(0, 3 - Math.floor(Math.log10(range))));
    return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  };
  const paths = [...svg.querySelectorAll("path[data-name]")];
  const listed = paths.length > 8 ? paths.filter((path) => !path.classList.contains("thin")) : paths;
  let curves = null;
  const read = () => listed.map((path) => ({
    name: path.dataset.name,
    colour: path.getAttribute("stroke"),
    points: path.getAttribute("d").slice(1).split("L").map((point) => point.split(",").map((at) => at / 1000)),
  }));
  const hide = () => { guide.hidden = tip.hidden = true; };
  const line = (name, value, colour) => {
    const row = document.createElement("p"), strong = document.createElement("b");
    if (colour) { row.appendChild(document.createElement("i")).style.background = colour; }
    row.append(name);
    strong.textContent = value;
    row.appendChild(strong);
    return row;
  };
  const show = (event) => {
    curves ??= read();
    const box = overlay.getBoundingClientRect();
    const wanted = Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const nearest = (points) => points.reduce((a, b) => (Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a));
    const found = curves.map((curve) => ({ ...curve, at: nearest(curve.points) }));
    const [x] = nearest(found.map((curve) => curve.at));
    guide.style.left = `${100 * x}%`;
    tip.replaceChildren(line(svg.dataset.xLabel, text(left + x * (right - left), right - left)));
    const close = found.filter((curve) => Math.abs(curve.at[0] - x) < 0.03);
    for (const { name, colour, at } of close) {
      const beyond = at[1] < -0.001 ? "> " : "";  // beyond a cut axis
      tip.append(line(name, beyond + text(high - Math.max(0, at[1]) * (high - low), high - low), colour));
    }
    guide.hidden = tip.hidden = false;
    const aside = x * box.width + (x < 0.5 ? 12 : -12 - tip.offsetWidth);
    tip.style.left = `${Math.min(Math.max(aside, -40), Math.max(box.width - tip.offsetWidth, -40))}px`;
  };
  overlay.addEventListener("pointermove", show);
  overlay.addEventListener("pointerdown", show);
  overlay.addEventListener("pointerleave", hide);
  hide();
}
