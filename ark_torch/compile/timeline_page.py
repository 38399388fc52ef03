"""Style and script of report_html.py's page: tables, and timelines that zoom, without a library.

Only visible bars are drawn, as SVG, and of bars narrower than half a pixel one per half pixel. So a plan of tens of
thousands of tasks can be panned smoothly. The page itself says what could not be drawn.
"""

STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; color: #222; margin: 24px auto; padding: 0 24px; max-width: 1280px; }
h1 { font-size: 21px; } h2 { font-size: 18px; margin-top: 32px; border-bottom: 1px solid #ddd; } h3 { font-size: 15px; }
table { border-collapse: collapse; margin: 8px 0 16px; font-size: 13px; }
th, td { border: 1px solid #ddd; padding: 3px 8px; text-align: left; vertical-align: top; }
th { background: #f4f5f7; } td { overflow-wrap: anywhere; }
.work td:nth-child(n+2) { text-align: right; font-variant-numeric: tabular-nums; }
.note { background: #fff6dd; border-left: 4px solid #e0a800; padding: 6px 10px; }
.error { color: #b00020; }
.timeline { border: 1px solid #ddd; border-radius: 4px; margin: 8px 0 24px; position: relative; }
.timeline .bar { display: flex; flex-wrap: wrap; gap: 12px; align-items: center; padding: 6px 10px; font-size: 12px; }
.timeline button { font: inherit; padding: 1px 8px; }
.timeline i { display: inline-block; width: 11px; height: 11px; margin-right: 4px; border-radius: 2px; }
.timeline .lanes { max-height: 560px; overflow-y: auto; }
.timeline svg { display: block; width: 100%; cursor: grab; user-select: none; touch-action: pan-y; }
.timeline svg:focus { outline: 2px solid #4e79a7; }
.tip { position: fixed; pointer-events: none; background: #222; color: #fff; padding: 5px 8px; border-radius: 4px;
  font-size: 12px; max-width: 420px; white-space: pre-line; display: none; z-index: 9; }
footer { color: #777; font-size: 12px; margin-top: 32px; }
"""

SCRIPT = r"""
"use strict";
(() => {
const COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#edc948", "#9c755f"];
const LEFT = 76, AXIS = 22, MANY = 40;
const NS = "http://www.w3.org/2000/svg";
const tip = document.body.appendChild(Object.assign(document.createElement("div"), { className: "tip" }));

function element(name, attributes, parent, text) {
  const made = document.createElementNS(NS, name);
  for (const key in attributes) made.setAttribute(key, attributes[key]);
  if (text !== undefined) made.textContent = text;
  parent.appendChild(made);
  return made;
}

function control(parent, label, title, act) {
  const button = document.createElement("button");
  button.textContent = label;
  button.title = title;
  button.onclick = act;
  parent.appendChild(button);
}

// Steps of 1, 2 or 5 times a power of ten, about one in 120 pixels.
function step(span, width) {
  const rough = span * 120 / width, power = 10 ** Math.floor(Math.log10(rough));
  return power * ([1, 2, 5].find(factor => factor * power >= rough) || 10);
}

function timeline(box, plan) {
  const lane = plan.workers <= MANY ? 22 : 6, height = AXIS + plan.workers * lane + 4;
  const whole = plan.tasks.reduce((end, task) => Math.max(end, task[1] + task[2]), 1e-3);
  const kinds = [...new Set(plan.stages.map(stage => stage[0]))];
  const colours = kinds.map((kind, i) => COLOURS[i] || `hsl(${i * 137.5 % 360} 45% 48%)`);
  const colour = kind => colours[kinds.indexOf(kind)];
  const rows = Array.from({ length: plan.workers }, () => []);
  for (const task of plan.tasks) rows[task[0]].push(task);
  for (const row of rows) row.sort((a, b) => a[1] - b[1]);
  const count = plan.tasks.length === 1 ? "1 task" : plan.tasks.length + " tasks";
  let from = 0, span = whole;

  const bar = box.appendChild(Object.assign(document.createElement("div"), { className: "bar" }));
  control(bar, "+", "zoom in", () => zoom(0.5));
  control(bar, "\u2212", "zoom out", () => zoom(2));
  control(bar, "all", "the whole step", () => { from = 0; span = whole; draw(); });
  for (const kind of kinds) {
    const entry = bar.appendChild(document.createElement("span"));
    entry.appendChild(document.createElement("i")).style.background = colour(kind);
    entry.append(kind);
  }
  const shown = bar.appendChild(document.createElement("span"));
  const lanes = box.appendChild(Object.assign(document.createElement("div"), { className: "lanes" }));
  const svg = element("svg", { height, tabindex: 0, role: "img" }, lanes);
  svg.setAttribute("aria-label", "estimated schedule: a row for each worker, a bar for each task");

  const width = () => Math.max(50, (svg.clientWidth || 1200) - LEFT - 8);
  function clamp() {
    span = Math.min(whole, Math.max(whole / 1e5, span));
    from = Math.min(whole - span, Math.max(0, from));
  }
  function zoom(factor, at = 0.5) {
    const centre = from + span * at;
    span *= factor;
    clamp();
    from = centre - span * at;
    draw();
  }
  function draw() {
    clamp();
    const scale = width() / span;
    svg.textContent = "";
    const pitch = step(span, width());
    for (let tick = Math.ceil(from / pitch) * pitch; tick <= from + span; tick += pitch) {
      const x = LEFT + (tick - from) * scale;
      element("line", { x1: x, x2: x, y1: AXIS - 4, y2: height, stroke: "#e4e4e4" }, svg);
      const digits = Math.max(0, -Math.floor(Math.log10(pitch)));
      element("text", { x, y: 13, "text-anchor": "middle", "font-size": 11 }, svg, tick.toFixed(digits) + " us");
    }
    const every = lane > 10 ? 1 : 10;
    rows.forEach((row, worker) => {
      const y = AXIS + worker * lane;
      if (worker % every === 0) {
        element("text", { x: 4, y: y + Math.min(lane, 15), "font-size": 11, fill: "#555" }, svg, "worker " + worker);
      }
      let last = -1;
      for (const task of row) {
        const left = Math.max(0, (task[1] - from) * scale);
        const right = Math.min(width(), (task[1] + task[2] - from) * scale);
        if (right < 0 || left > width() || right < left) continue;
        if (right - left < 0.5 && Math.floor(right * 2) === last) continue;
        last = Math.floor(right * 2);
        const name = plan.stages[task[3]][0], size = Math.max(0.5, right - left);
        const place = { x: LEFT + left, y, width: size, height: lane - (lane > 10 ? 4 : 1) };
        const look = { class: "task", fill: colour(name), stroke: "#fff", "stroke-width": size > 3 ? 0.5 : 0 };
        element("rect", { ...place, ...look }, svg).task = task;
        if (lane > 10 && size > 40) {
          const text = name.slice(0, Math.floor(size / 7));
          const at = { x: LEFT + left + 3, y: y + 13, "font-size": 11, fill: "#fff", "pointer-events": "none" };
          element("text", at, svg, text);
        }
      }
    });
    shown.textContent = `${count}, ${from.toFixed(2)} to ${(from + span).toFixed(2)} of ` +
      `${whole.toFixed(2)} us (wheel with Ctrl: zoom, drag: move, keys: + - 0 and arrows)`;
  }

  svg.addEventListener("wheel", event => {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    zoom(Math.exp(event.deltaY * 0.002), Math.min(1, Math.max(0, (event.offsetX - LEFT) / width())));
  }, { passive: false });
  let held = null;
  svg.addEventListener("pointerdown", event => {
    held = [event.clientX, from];
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointerup", () => { held = null; });
  svg.addEventListener("dblclick", event => zoom(0.4, Math.min(1, Math.max(0, (event.offsetX - LEFT) / width()))));
  svg.addEventListener("pointermove", event => {
    if (held) {
      from = held[1] - (event.clientX - held[0]) / width() * span;
      draw();
    }
    const over = document.elementFromPoint(event.clientX, event.clientY), task = over && over.task;
    tip.style.display = task && !held ? "block" : "none";
    if (!task) return;
    const [name, kind, origin] = plan.stages[task[3]];
    const waits = task[6].length ? "\nwaits for " + task[6].join("; ") : "";
    tip.textContent = `${name} (${kind})\n${origin}\nrows ${task[4]} to ${task[5]}, worker ${task[0]}\n` +
      `${task[2].toFixed(2)} us from ${task[1].toFixed(2)}${waits}`;
    tip.style.left = Math.min(event.clientX + 14, window.innerWidth - 430) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  svg.addEventListener("pointerleave", () => { tip.style.display = "none"; });
  svg.addEventListener("keydown", event => {
    const acts = { "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => zoom(whole / span),
      ArrowLeft: () => { from -= span / 5; draw(); }, ArrowRight: () => { from += span / 5; draw(); } };
    if (!acts[event.key]) return;
    event.preventDefault();
    acts[event.key]();
  });
  window.addEventListener("resize", draw);
  draw();
}

const plans = JSON.parse(document.getElementById("timelines").textContent);
for (const box of document.querySelectorAll(".timeline")) {
  try {
    timeline(box, plans[Number(box.dataset.plan)]);
  } catch (error) {
    box.appendChild(Object.assign(document.createElement("p"), { className: "error", textContent: String(error) }));
    console.error(error);
  }
}
document.body.dataset.drawn = String(document.querySelectorAll("rect.task").length);
})();
"""
