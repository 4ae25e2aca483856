// Draws the timeline on a canvas and handles zoom, drag, hover and keyboard. All texts and colours come from the
// data of the page; see html_viewer.py.
(() => {
  "use strict";

  const data = JSON.parse(document.getElementById("data").textContent);
  const blocks = data.blocks;
  const canvas = document.getElementById("canvas");
  const tip = document.getElementById("tip");
  const pen = canvas.getContext("2d");
  const night = matchMedia("(prefers-color-scheme: dark)");

  const ROW = Math.min(54, 6000 / data.ranks); // browsers limit the height of a canvas
  const BLOCK = (ROW * 2) / 3, GAP = ROW / 3, TOP = 44, BOTTOM = 26, RIGHT = 16;
  const ROOMY = ROW >= 50; // room for text
  const AREA = 16e6; // maximum pixels of the canvas
  const FAMILY = 'ui-sans-serif, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';
  const LABEL = `600 12px ${FAMILY}`, SMALL = `9px ${FAMILY}`, AXIS = `11px ${FAMILY}`, RANK = `13px ${FAMILY}`;
  const DEEPEST = 1e6; // maximum zoom

  let left = 70, width = 0, height = 0;
  let view = { start: 0, span: data.span };
  let theme = {};
  let byVersion = false;
  let hovered = -1;
  let waiting = false;

  // Block indices of each rank, sorted by time: blocks with a duration, and updates without one.
  const rows = Array.from({ length: data.ranks }, () => ({ timed: [], ticks: [] }));
  blocks.rank.forEach((rank, at) => {
    rows[rank][blocks.end[at] > blocks.start[at] ? "timed" : "ticks"].push(at);
  });

  const x = (time) => left + ((time - view.start) / view.span) * (width - left - RIGHT);
  const timeAt = (place) => view.start + ((place - left) / (width - left - RIGHT)) * view.span;
  const y = (rank) => TOP + rank * ROW;
  const isTick = (at) => blocks.end[at] === blocks.start[at];

  // The position of the first block in a list that ends after a time.
  function firstAfter(list, time) {
    let low = 0, high = list.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (blocks.end[list[middle]] > time) high = middle; else low = middle + 1;
    }
    return low;
  }

  const widths = new Map();
  function textWidth(font, text) {
    const key = font + text;
    if (!widths.has(key)) {
      pen.font = font;
      widths.set(key, pen.measureText(text).width);
    }
    return widths.get(key);
  }

  function write(font, text, place, baseline, colour, align = "center") {
    pen.font = font;
    pen.fillStyle = colour;
    pen.textAlign = align;
    pen.fillText(text, place, baseline);
  }

  // The hatched background of a style, drawn once and cached.
  const grounds = new Map();
  function ground(style) {
    if (!style.hatch) return style.fill;
    const key = style.fill + style.hatch;
    if (!grounds.has(key)) {
      const tile = document.createElement("canvas");
      tile.width = tile.height = 8;
      const brush = tile.getContext("2d");
      brush.fillStyle = style.fill;
      brush.fillRect(0, 0, 8, 8);
      brush.strokeStyle = style.line;
      brush.lineWidth = 2;
      brush.beginPath();
      for (const shift of [-8, 0, 8]) {
        const ends = style.hatch === "/" ? [-2, 10, 10, -2] : [-2, -2, 10, 10];
        brush.moveTo(ends[0] + shift, ends[1]);
        brush.lineTo(ends[2] + shift, ends[3]);
      }
      brush.stroke();
      grounds.set(key, pen.createPattern(tile, "repeat"));
    }
    return grounds.get(key);
  }

  function styleOf(at) {
    if (byVersion) return data.tones[blocks.tone[at]];
    const style = data.styles[blocks.style[at]];
    return night.matches ? style.night : style;
  }

  function drawBlock(at, top) {
    const from = Math.max(x(blocks.start[at]), left - 8), to = Math.min(x(blocks.end[at]), width + 8);
    const wide = Math.max(to - from, 0.7), style = styleOf(at);
    pen.fillStyle = ground(style);
    if (wide < 5) {
      pen.fillRect(from, top, wide < 2 ? wide + 0.4 : wide - 0.5, BLOCK); // no gaps between the thinnest
      return;
    }
    pen.beginPath();
    pen.roundRect(from + 0.5, top + 0.5, wide - 1, BLOCK - 1, 2.5);
    pen.fill();
    pen.strokeStyle = style.edge;
    pen.lineWidth = 1;
    pen.stroke();
    if (ROOMY) drawTexts(at, Math.max(from, left), Math.min(to, width - RIGHT), top, style.ink);
  }

  // Label and version, centred in the visible part of the block.
  function drawTexts(at, from, to, top, ink) {
    const middle = (from + to) / 2, room = to - from - 3;
    const label = data.strings[blocks.label[at]], version = data.strings[blocks.version[at]];
    if (textWidth(LABEL, label) > room) return;
    write(LABEL, label, middle, top + 16, ink);
    const wide = textWidth(SMALL, version);
    if (wide > room) return;
    write(SMALL, version, middle, top + 27, ink);
    if (!blocks.mark[at]) return;
    pen.strokeStyle = ink;
    pen.lineWidth = 2;
    pen.setLineDash(blocks.mark[at] === 2 ? [2, 2] : []);
    pen.beginPath();
    pen.moveTo(middle - wide / 2, top + 31);
    pen.lineTo(middle + wide / 2, top + 31);
    pen.stroke();
    pen.setLineDash([]);
  }

  function drawTicks(list, top) {
    let free = -Infinity;
    pen.lineWidth = 2;
    for (let i = firstAfter(list, view.start - 1e-9 * data.span); i < list.length; i++) {
      const at = list[i], place = x(blocks.end[at]), text = data.strings[blocks.label[at]];
      if (place > width) break;
      pen.strokeStyle = byVersion ? styleOf(at).fill : theme.text;
      pen.beginPath();
      pen.moveTo(place, top - 5);
      pen.lineTo(place, top + BLOCK + 1);
      pen.stroke();
      const half = textWidth(SMALL, text) / 2, centre = Math.min(place, width - 4 - half);
      if (!ROOMY || centre - half < free) continue;
      write(SMALL, text, centre, top - 7.5, theme.text);
      free = centre + half + 3;
    }
  }

  // Of several blocks within one pixel, only the first is drawn.
  function drawRow(rank) {
    const { timed, ticks } = rows[rank], top = y(rank), end = view.start + view.span;
    let drawn = 0, pixel = -1;
    pen.fillStyle = theme.idle;
    pen.fillRect(x(Math.max(0, view.start)), top, x(Math.min(data.span, end)) - x(Math.max(0, view.start)), BLOCK);
    for (let i = firstAfter(timed, view.start); i < timed.length && blocks.start[timed[i]] < end; i++) {
      const at = timed[i], place = Math.floor(x(blocks.end[at]));
      if (place === pixel && x(blocks.start[at]) >= place) continue;
      pixel = place;
      drawBlock(at, top);
      drawn++;
    }
    drawTicks(ticks, top);
    return drawn;
  }

  // Outlines the hovered block and all visible blocks of its micro-batch.
  function drawHovered() {
    if (hovered < 0) return;
    const same = blocks.microbatch[hovered];
    const near = (at) => (same >= 0 && blocks.microbatch[at] === same) || at === hovered;
    for (let rank = 0; rank < data.ranks; rank++) {
      const timed = rows[rank].timed;
      for (let i = firstAfter(timed, view.start); i < timed.length; i++) {
        const at = timed[i], from = x(blocks.start[at]);
        if (from > width) break;
        if (!near(at)) continue;
        pen.strokeStyle = theme.accent;
        pen.lineWidth = at === hovered ? 3.5 : 2;
        pen.strokeRect(from, y(rank) - 0.5, Math.max(2, x(blocks.end[at]) - from), BLOCK + 1);
      }
    }
    if (isTick(hovered)) {
      pen.fillStyle = theme.accent;
      pen.fillRect(x(blocks.end[hovered]) - 2, y(blocks.rank[hovered]) - 5, 4, BLOCK + 6);
    }
  }

  function drawAxis() {
    const least = (view.span * 76) / (width - left - RIGHT), power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].find((factor) => factor * power >= least * (1 - 1e-9)) * power;
    const digits = Math.max(0, Math.min(12, -Math.floor(Math.log10(step) + 1e-9)));
    const last = Math.min(data.span, view.start + view.span) * (1 + 1e-9);
    for (let n = Math.max(0, Math.ceil(view.start / step - 1e-9)); n * step <= last; n++) {
      const place = x(n * step);
      pen.fillStyle = theme.rule;
      pen.fillRect(Math.round(place), 22, 1, height - 22 - BOTTOM + 6);
      write(AXIS, (n * step).toFixed(digits), place, 17, theme.muted);
    }
  }

  // Rank names, drawn over blocks that reach into the margin, and a scroll bar for the visible part.
  function drawMargins() {
    pen.fillStyle = theme.paper;
    pen.fillRect(0, 0, left - 4, height);
    for (let rank = 0; rank < data.ranks; rank += Math.ceil(16 / ROW)) {
      write(RANK, `${width < 560 ? "r" : "rank "}${rank}`, 14, y(rank) + BLOCK / 2 + 4.5, theme.text, "left");
    }
    if (width >= 560) write(AXIS, "time", 14, 17, theme.muted, "left");
    if (view.span >= data.span) return;
    const whole = width - left - RIGHT, part = Math.max(14, (view.span / data.span) * whole);
    const place = left + Math.min(1, view.start / (data.span - view.span)) * (whole - part);
    for (const [colour, from, wide] of [[theme.rule, left, whole], [theme.muted, place, part]]) {
      pen.fillStyle = colour;
      pen.fillRect(from, height - 12, wide, 4);
    }
  }

  function draw() {
    waiting = false;
    pen.clearRect(0, 0, width, height);
    drawAxis();
    let drawn = 0;
    for (let rank = 0; rank < data.ranks; rank++) drawn += drawRow(rank);
    drawHovered();
    drawMargins();
    canvas.dataset.drawn = drawn;
    canvas.dataset.view = `${view.start} ${view.span}`;
  }

  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(draw);
  }

  function resize() {
    width = canvas.clientWidth;
    height = Math.round(y(data.ranks - 1) + BLOCK + BOTTOM);
    const ratio = Math.min(window.devicePixelRatio || 1, Math.sqrt(AREA / (width * height)));
    left = (width < 560 ? 14 : 40) + 10 + 9 * String(data.ranks - 1).length + 14;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    draw();
  }

  function retheme() {
    const style = getComputedStyle(document.documentElement);
    for (const name of ["paper", "text", "muted", "rule", "idle", "accent"]) {
      theme[name] = style.getPropertyValue(`--${name}`).trim();
    }
    later();
  }

  // Sets the visible part, clamped to the timeline.
  function show(start, span) {
    view.span = Math.min(data.span, Math.max(data.span / DEEPEST, span));
    view.start = Math.min(data.span - view.span, Math.max(0, start));
    later();
  }

  function zoom(factor, time = view.start + view.span / 2) {
    const span = Math.min(data.span, Math.max(data.span / DEEPEST, view.span / factor));
    show(time - ((time - view.start) / view.span) * span, span);
  }

  function find(place, height) {
    const rank = Math.floor((height - TOP + GAP / 2) / ROW);
    if (rank < 0 || rank >= data.ranks || place < left) return -1;
    const { timed, ticks } = rows[rank];
    const reach = (4 / (width - left - RIGHT)) * view.span, time = timeAt(place);
    const tick = ticks[firstAfter(ticks, time - reach)];
    if (tick !== undefined && blocks.end[tick] <= time + reach) return tick;
    const block = timed[firstAfter(timed, time)];
    return block !== undefined && blocks.start[block] <= time ? block : -1;
  }

  function point(at, place) {
    hovered = at;
    later();
    tip.hidden = at < 0;
    if (at < 0) return;
    const list = document.createElement("dl");
    data.names.forEach((name, field) => {
      const text = data.strings[blocks.fields[at][field]];
      if (!text) return;
      for (const [tag, words] of [["dt", name], ["dd", text]]) {
        const cell = document.createElement(tag);
        cell.textContent = words;
        list.append(cell);
      }
    });
    tip.replaceChildren(list);
    const top = y(blocks.rank[at]), tall = tip.offsetHeight;
    const above = canvas.getBoundingClientRect().top + top + BLOCK + 12 + tall > innerHeight && top > tall;
    tip.style.left = `${Math.max(4, Math.min(place + 12, width - tip.offsetWidth - 4))}px`;
    tip.style.top = `${above ? top - tall - 12 : top + BLOCK + 12}px`;
  }

  // The next block for an arrow key: along the rank (indices are in that order), or on another rank, the nearest
  // in time.
  function step(along, across) {
    if (hovered < 0) return rows[0].timed[firstAfter(rows[0].timed, view.start)];
    if (along) return blocks.rank[hovered + along] === blocks.rank[hovered] ? hovered + along : hovered;
    const timed = rows[Math.min(data.ranks - 1, Math.max(0, blocks.rank[hovered] + across))].timed;
    return timed[Math.min(timed.length - 1, firstAfter(timed, (blocks.start[hovered] + blocks.end[hovered]) / 2))];
  }

  function go(at) {
    if (at === undefined) return;
    const middle = (blocks.start[at] + blocks.end[at]) / 2;
    if (middle < view.start || middle > view.start + view.span) show(middle - view.span / 2, view.span);
    point(at, x(middle));
  }

  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const arrow = ARROWS[event.key];
    if (arrow && event.shiftKey) show(view.start + (arrow[0] * view.span) / 8, view.span);
    else if (arrow) go(step(...arrow));
    else if (event.key === "+" || event.key === "=") zoom(1.5);
    else if (event.key === "-") zoom(1 / 1.5);
    else if (event.key === "0" || event.key === "Home") show(0, data.span);
    else if (event.key === "Escape") point(-1);
    else return;
    event.preventDefault();
  });

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const pixels = event.deltaMode ? 30 : 1;
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const shift = (event.deltaX || event.deltaY) * pixels;
      show(view.start + (shift / (width - left - RIGHT)) * view.span, view.span);
    } else {
      zoom(Math.exp(-event.deltaY * pixels * 0.002), timeAt(event.offsetX));
    }
  }, { passive: false });

  // One pointer drags, two pointers pinch.
  const pointers = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    pointers.set(event.pointerId, event.offsetX);
    if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
    canvas.classList.add("dragged");
  });
  canvas.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (before === undefined) {
      point(find(event.offsetX, event.offsetY), event.offsetX);
      return;
    }
    const others = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
    if (others.length) {
      const far = Math.abs(before - others[0]), now = Math.abs(event.offsetX - others[0]);
      if (far > 8 && now > 8) zoom(now / far, timeAt((event.offsetX + others[0]) / 2));
    } else if (event.offsetX !== before) {
      show(view.start - ((event.offsetX - before) / (width - left - RIGHT)) * view.span, view.span);
      if (Math.abs(event.offsetX - before) > 2) point(-1);
    }
    pointers.set(event.pointerId, event.offsetX);
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, (event) => {
      pointers.delete(event.pointerId);
      if (!pointers.size) canvas.classList.remove("dragged");
    });
  }
  canvas.addEventListener("click", (event) => point(find(event.offsetX, event.offsetY), event.offsetX));
  canvas.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") point(-1); });
  canvas.addEventListener("blur", () => point(-1));

  document.getElementById("in").addEventListener("click", () => zoom(1.5));
  document.getElementById("out").addEventListener("click", () => zoom(1 / 1.5));
  document.getElementById("reset").addEventListener("click", () => show(0, data.span));
  for (const choice of document.getElementsByName("colour")) {
    choice.addEventListener("change", () => {
      byVersion = document.querySelector("[name=colour]:checked").value === "version";
      document.getElementById("by-pass").hidden = byVersion;
      document.getElementById("by-version").hidden = !byVersion;
      later();
    });
  }

  retheme();
  night.addEventListener("change", retheme);
  new ResizeObserver(resize).observe(canvas.parentElement);
  resize();
})();
