// Views of a trace: the strip shows the state of every token of a prompt, the waterfall the parts of the time to the
// first token.
import { h, ms, picture, svg } from './dom.js';

/** State -> legend and short name, saved work first. The states are those of `usage.mpic.trace`. */
export const STATES = {
  device: ['reused from the device', 'device'],
  host: ['reused from host memory', 'host'],
  disk: ['reused from disk', 'disk'],
  prefix: ['found in the prefix cache', 'prefix'],
  compiled: ['compiled for this answer, then reused', 'compiled now'],
  recomputed: ['recomputed by the policy', 'recomputed'],
  new: ['new text, computed', 'new'],
};
const STAGES = { queue_ms: ['queue', 'waiting for a place in the batch'], load_ms: ['load', 'reading compiled caches'], link_ms: ['link', 'computing what was not reused'] };
const HEIGHT = 44, WIDEST = 308;  // pixels
const CELLS = [[600, 11], [2000, 8], [8000, 5], [40000, 3]];  // up to so many tokens: cells of so many pixels

const legend = (state) => (STATES[state] || [state, state])[0];
const counts = (trace) => {
  const found = {};
  for (const span of trace.spans) found[span.state] = (found[span.state] || 0) + span.end - span.start;
  return found;
};

/** The tokens that were not computed for an answer. */
export const saved = (usage) => usage.mpic.tokens.reused + usage.mpic.tokens.prefix_hit;

const blocksOf = (spans) => {
  const blocks = [];
  let last = null;
  for (const span of spans) {
    const own = span.kind === 'text';
    const name = own ? 'text' : `${span.kind} ${span.label} ${span.file_id}`;
    if (last?.name === name) { last.spans.push(span); last.end = span.end; }
    else blocks.push(last = { name, kind: span.kind, label: own ? '' : span.label, id: own ? '' : span.file_id, start: span.start, end: span.end, spans: [span] });
  }
  return blocks;
};

/** Draws the cells of a span as at most three rectangles: the rest of a row, whole rows, the beginning of a row. */
const drawn = (span, block, columns, cell, each) => {
  const rects = [], end = Math.ceil((span.end - block.start) / each);
  let first = Math.floor((span.start - block.start) / each);
  while (first < end) {
    const row = Math.floor(first / columns), column = first % columns;
    const whole = column === 0 && end - first >= columns;
    const n = whole ? columns : Math.min(columns - column, end - first), rows = whole ? Math.floor((end - first) / columns) : 1;
    rects.push(svg('rect', { x: column * cell, y: row * cell, width: n * cell, height: rows * cell }));
    first += n * rows;
  }
  const n = span.end - span.start, what = block.kind === 'text' ? 'text' : `${block.kind} ${block.label || ''}`.trim();
  const where = n > 1 ? `tokens ${span.start} to ${span.end - 1}` : `token ${span.start}`;
  return svg('g', { class: `s-${span.state}` }, svg('title', {}, `${what}, ${where} (${n}): ${legend(span.state)}`), rects);
};

const blockOf = (block, cell, each, open) => {
  const cells = Math.ceil((block.end - block.start) / each);
  let rows = Math.max(1, Math.floor(HEIGHT / cell));
  let columns = Math.ceil(cells / rows);
  if (columns * cell > WIDEST) columns = Math.floor(WIDEST / cell);
  rows = Math.ceil(cells / columns);
  const size = { width: columns * cell, height: rows * cell };
  const grid = svg('svg', { ...size, viewBox: `0 0 ${size.width} ${size.height}`, 'aria-hidden': 'true' },
    block.spans.map((span) => drawn(span, block, columns, cell, each)));
  const words = [h('b', {}, block.label || block.kind), h('small', {}, `${block.end - block.start} tokens`)];
  const head = block.kind === 'text' ? null
    : h('button', { type: 'button', class: 'block-head', onclick: () => open(block), title: `Open ${block.label || block.kind}` },
      picture({ kind: block.kind, id: block.id }), h('span', {}, words));
  return h('div', { class: `block ${block.kind}` }, head, h('div', { class: 'cells', style: { '--cell': `${cell}px` } }, grid, h('i', {})));
};

/** The strip of one prompt. `open` is called with the block of an image or a document. */
export const strip = (trace, open) => {
  const found = counts(trace), total = trace.tokens;
  const [most, cell] = CELLS.find(([n]) => total <= n) || CELLS.at(-1);
  const each = total <= most ? 1 : Math.ceil(total / most);
  const present = Object.keys(STATES).filter((state) => found[state]);
  const label = `${total} tokens of the prompt: ${present.map((state) => `${found[state]} ${legend(state)}`).join(', ')}`;
  return [
    h('div', { class: 'strip', role: 'group', 'aria-label': label }, blocksOf(trace.spans).map((block) => blockOf(block, cell, each, open))),
    each > 1 ? h('p', { class: 'hint' }, `One cell stands for ${each} tokens.`) : null,
    h('ul', { class: 'legend' }, present.map((state) =>
      h('li', { title: `${found[state]} of ${total} tokens ${legend(state)}` }, h('i', { class: `s-${state}` }), STATES[state][1], ' ', h('b', {}, String(found[state]))))),
  ];
};

const bar = (name, meaning, from, length, scale) => h('div', { class: 'bar', title: `${name}: ${meaning}` }, h('span', {}, name),
  h('div', { class: 'track' }, h('i', { class: `w-${name.split(' ')[0]}`, style: { left: `${(100 * from) / scale}%`, width: `${(100 * length) / scale}%` } })),
  h('b', {}, ms(length)));

/** The stages up to the first token, one after the other; `scale` is the milliseconds of the full width. */
export const waterfall = (times, scale) => {
  const rows = [], total = times.first_token_ms, width = Math.max(scale || total, 1e-6);
  let from = 0;
  for (const [key, [name, meaning]] of Object.entries(STAGES)) {
    rows.push(bar(name, meaning, from, times[key], width));
    from += times[key];
  }
  rows.push(bar('first token', 'the answer begins', 0, total, width));
  return h('div', { class: 'waterfall', role: 'group', 'aria-label': `First token after ${ms(total)}` }, rows);
};

