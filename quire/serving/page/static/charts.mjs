// Drawing on canvases: steps, KV blocks, lines, the timeline. Colours come from the style sheet.

import { CACHED, WINDOW_S } from "./engine_model.mjs";

const NAMES = ["text", "dim", "line", "surface", "prefill", "decode", "queue", "cached", "warn", "o0", "o1", "o2", "o3", "o4", "o5", "o6", "o7"];
const NUM_OWNERS = 8;
const NUM_MARKS = 5;
const MIN_SPAN_S = 2;
export const BAR_PX = 6;

export function theme() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Returns the context of a canvas, cleared and scaled so that units are CSS pixels, with its size.
export function open(canvas) {
  const ratio = Math.min(devicePixelRatio || 1, 3);
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "alphabetic";
  return { context, width, height };
}

// The next round number: 1, 2 or 5 times a power of ten.
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((factor) => factor * power).find((round) => round >= value * 0.999);
}

const short = (value) => (value >= 1000 ? `${Number((value / 1000).toPrecision(3))}k` : String(Number(value.toPrecision(3))));
const milliseconds = (value) => (value >= 1000 ? `${Number((value / 1000).toPrecision(3))} s` : `${Number(value.toPrecision(3))} ms`);

// Fills a box with stripes of a colour: what is told by colour is told by pattern too.
export function stripes(context, x, y, width, height, colour, gap = 4) {
  if (width <= 0 || height <= 0) return;
  context.save();
  context.beginPath();
  context.rect(x, y, width, height);
  context.clip();
  context.strokeStyle = colour;
  context.lineWidth = 1.2;
  context.beginPath();
  for (let at = Math.floor((x - height) / gap) * gap; at < x + width; at += gap) {
    context.moveTo(at, y + height);
    context.lineTo(at + height, y);
  }
  context.stroke();
  context.restore();
}

function axis({ context, width, height }, colours, top, unit) {
  context.strokeStyle = colours.line;
  context.fillStyle = colours.dim;
  context.lineWidth = 1;
  context.beginPath();
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(height - 4 - share * (height - 20)) + 0.5;
    context.moveTo(0, y);
    context.lineTo(width, y);
  }
  context.stroke();
  context.fillText(unit(top), 2, 12);
  context.fillText(unit(top / 2), 2, height - 4 - 0.5 * (height - 20) - 3);
}

// One bar a step, newest at the right; its height is the duration, its parts are tokens of prefill and decode.
export function drawSteps(canvas, steps, cursor) {
  const colours = theme();
  const box = open(canvas);
  const { context, width, height } = box;
  const shown = steps.slice(-Math.floor(width / BAR_PX));
  const sorted = shown.map((step) => step.duration).sort((a, b) => a - b);
  // One very long step must not flatten all others: it is cut, and marked.
  const usual = sorted[Math.floor(sorted.length * 0.95)] ?? 0.1;
  const top = roundUp(Math.max(Math.min(sorted.at(-1) ?? 0, usual * 3), 0.1));
  axis(box, colours, top, milliseconds);
  const floor = height - 4;
  shown.forEach((step, index) => {
    const x = width - (shown.length - index) * BAR_PX;
    const tall = Math.max(Math.min(step.duration / top, 1) * (height - 20), 1);
    const total = Math.max(step.prefill + step.decode, 1);
    const decodeTall = (tall * step.decode) / total;
    context.fillStyle = colours.decode;
    context.fillRect(x, floor - decodeTall, BAR_PX - 1, decodeTall);
    context.fillStyle = colours.prefill;
    context.fillRect(x, floor - tall, BAR_PX - 1, tall - decodeTall);
    stripes(context, x, floor - tall, BAR_PX - 1, tall - decodeTall, colours.surface, 4);
    if (step.duration > top) {
      context.fillStyle = colours.surface;
      context.fillRect(x - 1, floor - tall + 5, BAR_PX + 1, 2);
    }
    if (step.preemptions) {
      context.fillStyle = colours.warn;
      context.fillText("▾", x - 2, floor - tall - 2);
    }
    if (step.id === cursor) {
      context.strokeStyle = colours.text;
      context.lineWidth = 1.5;
      context.strokeRect(x - 1, floor - tall - 1, BAR_PX + 1, tall + 2);
    }
  });
  return shown;
}

// A map folds when at least this share of its cells is free, and then in places where so many rows in a row are.
const FOLD_SHARE = 0.75;
const FOLD_ROWS = 3;
const FOLD_PX = 16;

export function isMostlyEmpty(kv) {
  const numCells = Math.ceil(kv.num_blocks / kv.blocks_per_cell);
  const numHeld = kv.runs.reduce((total, [, length]) => total + length, 0);
  return numHeld <= (1 - FOLD_SHARE) * numCells;
}

// Returns the rows of cells from top to bottom as bands {row, rows, y, tall, isFolded}.
function bandsOf(kv, rows, columns, size, folds) {
  const bands = [];
  const add = (row, until, isFolded) => {
    if (row >= until) return;
    const last = bands.at(-1);
    bands.push({ row, rows: until - row, y: last ? last.y + last.tall : 0, tall: isFolded ? FOLD_PX : (until - row) * size, isFolded });
  };
  let shown = 0; // all rows before it are in bands
  let free = 0; // the first row after the last one that holds something
  const end = (next) => {
    if (next - free >= FOLD_ROWS && (next - free) * size > FOLD_PX) {
      add(shown, free, false);
      add(free, next, true);
      shown = next;
    }
  };
  for (const [first, length] of folds ? kv.runs : []) {
    end(Math.floor(first / columns));
    free = Math.floor((first + length - 1) / columns) + 1;
  }
  if (folds) end(rows);
  add(shown, rows, false);
  return bands;
}

// How cells of KV blocks are laid out in a canvas: {size, columns, rows, bands, tall}. The size of a cell is that of the whole
// map, so that it does not change while blocks are taken.
export function layout(kv, width, maxHeight, folds) {
  const numCells = Math.ceil(kv.num_blocks / kv.blocks_per_cell);
  let size = 18;
  while (size > 2 && Math.ceil(numCells / Math.max(Math.floor(width / size), 1)) * size > maxHeight) size -= 1;
  const columns = Math.max(Math.floor(width / size), 1);
  const rows = Math.ceil(numCells / columns);
  const bands = bandsOf(kv, rows, columns, size, folds);
  return { size, columns, rows, bands, tall: bands.reduce((total, band) => total + band.tall, 0) };
}

// Returns the cell at a place of the map: its index, and how many cells stand there, more than one where the map folds.
export function cellAt(grid, x, y) {
  const band = grid.bands.find((one) => y < one.y + one.tall) ?? grid.bands.at(-1);
  if (band.isFolded) return { index: band.row * grid.columns, count: band.rows * grid.columns };
  return { index: (band.row + Math.floor((y - band.y) / grid.size)) * grid.columns + Math.floor(x / grid.size), count: 1 };
}

// Marks and colours come round with different periods, so that neighbours differ in both.
export function cell(context, x, y, size, number, count, colours) {
  const inner = size > 4 ? size - 1 : size;
  if (number === CACHED) {
    context.fillStyle = colours.cached;
    context.fillRect(x, y, inner, inner);
    return;
  }
  context.fillStyle = colours[`o${number % NUM_OWNERS}`];
  context.fillRect(x, y, inner, inner);
  if (count > 1 && size > 2) stripes(context, x, y, inner, inner, colours.surface, size < 7 ? inner : 3.5);
  if (count > 1 || size < 7) return;
  const middle = inner / 2;
  context.fillStyle = colours.surface;
  const mark = number % NUM_MARKS;
  if (mark === 1) context.fillRect(x + middle - 1, y + middle - 1, 3, 3);
  else if (mark === 2) context.fillRect(x + 2, y + middle - 0.5, inner - 4, 1.5);
  else if (mark === 3) context.fillRect(x + middle - 0.5, y + 2, 1.5, inner - 4);
  else if (mark === 4) context.fillRect(x + 2, y + 2, 2.5, 2.5);
}

function drawFold({ context, width }, { y, rows }, grid, numCells, perCell, colours) {
  context.fillStyle = colours.dim;
  context.textAlign = "center";
  const count = Math.min(rows * grid.columns, numCells) * perCell;
  context.fillText(`${count} free blocks, folded`, width / 2, y + FOLD_PX - 5);
  context.textAlign = "left";
  context.strokeStyle = colours.line;
  context.setLineDash([4, 3]);
  context.strokeRect(0.5, y + 1.5, width - 1, FOLD_PX - 4);
  context.setLineDash([]);
}

export function drawKv(canvas, kv, maxHeight, folds) {
  const numCells = Math.ceil(kv.num_blocks / kv.blocks_per_cell);
  const grid = layout(kv, canvas.clientWidth, maxHeight, folds);
  const tall = `${grid.tall}px`;
  if (canvas.style.height !== tall) canvas.style.height = tall;
  const colours = theme();
  const box = open(canvas);
  const { context } = box;
  const inner = grid.size > 4 ? grid.size - 1 : grid.size;
  const tops = new Map(); // of the rows that are shown
  for (const band of grid.bands) {
    if (band.isFolded) {
      drawFold(box, band, grid, numCells - band.row * grid.columns, kv.blocks_per_cell, colours);
      continue;
    }
    for (let row = 0; row < band.rows; row += 1) tops.set(band.row + row, band.y + row * grid.size);
    context.strokeStyle = context.fillStyle = colours.line;
    context.lineWidth = 1;
    if (grid.size <= 4) {
      context.globalAlpha = 0.4;
      context.fillRect(0, band.y, grid.columns * grid.size, band.tall);
      context.globalAlpha = 1;
    }
    for (let index = band.row * grid.columns; index < Math.min((band.row + band.rows) * grid.columns, numCells) && grid.size > 4; index += 1) {
      context.strokeRect((index % grid.columns) * grid.size + 0.5, tops.get(Math.floor(index / grid.columns)) + 0.5, inner - 1, inner - 1);
    }
  }
  for (const [first, length, number, count] of kv.runs) {
    for (let index = first; index < first + length; index += 1) {
      cell(context, (index % grid.columns) * grid.size, tops.get(Math.floor(index / grid.columns)), grid.size, number, count, colours);
    }
  }
  return grid;
}

// Lines over the last minute. series: [{name, colour, dash, values: [[secondsAgo, value]]}]
export function drawLines(canvas, series, { unit = short, dots = false } = {}) {
  const colours = theme();
  const box = open(canvas);
  const { context, width, height } = box;
  const all = series.flatMap(({ values }) => values.map(([, value]) => value));
  const top = roundUp(Math.max(...all, 0.001));
  axis(box, colours, top, unit);
  const place = ([ago, value]) => [width - (ago / WINDOW_S) * width, height - 4 - (value / top) * (height - 20)];
  for (const { colour, dash, values } of series) {
    context.strokeStyle = context.fillStyle = colours[colour];
    context.lineWidth = 2;
    context.setLineDash(dash ?? []);
    context.beginPath();
    for (const point of values) {
      const [x, y] = place(point);
      if (dots) {
        context.moveTo(x + 2.5, y);
        context.arc(x, y, 2.5, 0, 7);
      } else context.lineTo(x, y);
    }
    if (dots) context.fill();
    else context.stroke();
  }
  context.setLineDash([]);
}
export const unitMs = milliseconds;

// A row a request: waiting is outlined, prefill striped, decode solid.
export function drawTimeline(canvas, rows, nowMs) {
  const tall = 20;
  const height = `${Math.max(rows.length, 1) * tall + 18}px`;
  if (canvas.style.height !== height) canvas.style.height = height;
  const colours = theme();
  const { context, width } = open(canvas);
  const labels = width < 420 ? 72 : 150;
  const oldest = Math.min(nowMs, ...rows.map((row) => row.arrived));
  const span = Math.min(Math.max(roundUp((nowMs - oldest) / 1000), MIN_SPAN_S), WINDOW_S);
  const place = (time) => labels + Math.max(0, 1 - (nowMs - time) / (span * 1000)) * (width - labels);
  rows.forEach((row, index) => {
    const y = index * tall + 3;
    const end = row.ended ?? nowMs;
    const part = (from, to) => [place(from), y, Math.max(place(to) - place(from), from < to ? 1 : 0), tall - 7];
    context.fillStyle = colours.text;
    const label = row.label.length * 6 > labels ? `${row.label.slice(0, Math.floor(labels / 6.5) - 1)}…` : row.label;
    context.fillText(label, 0, y + 10);
    const queued = part(row.arrived, row.scheduled ?? end);
    context.strokeStyle = colours.queue;
    context.lineWidth = 1;
    if (queued[2] > 1) context.strokeRect(queued[0] + 0.5, queued[1] + 0.5, queued[2] - 1, queued[3] - 1);
    if (row.scheduled !== null) {
      const prefill = part(row.scheduled, row.first ?? end);
      context.fillStyle = colours.prefill;
      context.fillRect(...prefill);
      stripes(context, ...prefill, colours.surface, 4);
    }
    if (row.first !== null) {
      context.fillStyle = colours.decode;
      context.fillRect(...part(row.first, end));
    }
    if (row.reason !== null && row.reason !== "stop" && row.reason !== "length") {
      context.fillStyle = colours.warn;
      context.fillText("✕", Math.min(place(end) + 2, width - 10), y + 10);
    }
  });
  context.fillStyle = colours.dim;
  const bottom = Math.max(rows.length, 1) * tall + 13;
  context.fillText(`${span} s ago`, labels, bottom);
  context.textAlign = "right";
  context.fillText("now", width, bottom);
  context.textAlign = "left";
}
