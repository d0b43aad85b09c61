// Elements and texts. Everything on the page is made with `h`, never from a string of markup, so no text of a user or
// of a model can become markup.

export const $ = (selector, root = document) => root.querySelector(selector);
export const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];

const SVG = 'http://www.w3.org/2000/svg';

const put = (made, props, children) => {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith('on')) made.addEventListener(name.slice(2), value);
    else if (name === 'class') made.setAttribute('class', value);
    else if (name === 'data') Object.assign(made.dataset, value);
    else if (name === 'style') for (const [key, v] of Object.entries(value)) made.style.setProperty(key, v);
    else if (name === 'value') made.value = value;
    else made.setAttribute(name, value === true ? '' : String(value));
  }
  made.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return made;
};

/** Makes an element: attributes, `onclick` and the like, `data`, `style` as objects; children are elements or texts. */
export const h = (tag, props, ...children) => put(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => put(document.createElementNS(SVG, tag), props, children);

const PATHS = {
  menu: 'M4 7h16M4 12h16M4 17h16',
  close: 'M6 6l12 12M18 6L6 18',
  more: 'M5 12h.01M12 12h.01M19 12h.01',
  copy: 'M9 9h10v11H9zM5 15V4h10',
  attach: 'M12 5v14M5 12h14',
  down: 'M6 9l6 6 6-6',
  settings: 'M4 7h9M17 7h3M4 17h3M11 17h9M15 4.5v5M9 14.5v5',
  check: 'M5 12.5l4.5 4.5L19 7.5',
};

export const icon = (name) =>
  svg('svg', { class: 'icon', viewBox: '0 0 24 24', 'aria-hidden': 'true' }, svg('path', { d: PATHS[name] }));

export const button = (label, onclick, props = {}) =>
  h('button', { type: 'button', class: 'button', onclick, ...props }, label);
export const iconButton = (name, label, onclick, props = {}) =>
  h('button', { type: 'button', class: 'icon-button', 'aria-label': label, title: label, onclick, ...props }, icon(name));

/** A picture of a file or a reference; documents have a drawn one. */
export const picture = (item) => {
  if (item?.kind !== 'image' || !item.id) return h('span', { class: 'thumb document', 'aria-hidden': 'true' });
  const version = item.version ? `?v=${item.version}` : '';
  return h('img', { class: 'thumb', src: `/ui/thumbs/${item.id}${version}`, alt: '', loading: 'lazy' });
};

/** Whether a key belongs to a word that an input method is still making; some browsers say so only by the code 229. */
export const composing = (event) => event.isComposing || event.keyCode === 229;

// ---- texts

export const ms = (value) =>
  value >= 1000 ? `${(value / 1000).toFixed(2)} s` : value >= 10 ? `${Math.round(value)} ms` : `${value.toFixed(1)} ms`;

export const size = (bytes) => {
  if (bytes < 1000) return `${bytes} B`;
  const units = ['kB', 'MB', 'GB'];
  let value = bytes / 1000, unit = 0;
  while (value >= 1000 && unit < 2) { value /= 1000; unit += 1; }
  return `${value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
};

export const duration = (seconds) => {
  const value = Math.max(0, seconds);
  for (const [unit, length, most] of [['s', 1, 90], ['min', 60, 5400], ['h', 3600, 172800]]) {
    if (value < most) return `${Math.round(value / length)} ${unit}`;
  }
  return `${Math.round(value / 86400)} days`;
};

export const count = (n, noun) => `${n.toLocaleString('en')} ${noun}${n === 1 ? '' : 's'}`;
export const date = (seconds) => new Date(seconds * 1000).toLocaleString('en-GB', { dateStyle: 'medium', timeStyle: 'short' });

/** How prompts name a file. */
export const mention = (file) => (file.handle ? `${file.kind === 'image' ? 'IMAGE' : 'FILE'}#${file.handle}` : file.filename);
export const fold = (handle) => handle.normalize('NFC').toUpperCase().normalize('NFC');  // handles ignore case
export const HANDLE = /(?<![A-Za-z0-9_])(IMAGE|FILE)#([\p{L}\p{N}_.\-][\p{L}\p{N}\p{M}_.\-]*)/gu;

/** The handle in a word, as the API reads it: a full stop or hyphen after it ends the sentence, unless a file has this
 * name, and so does another script after a name in ASCII. `known` has the folded handles. */
export const handleIn = (word, known) => {
  const whole = withoutStops(word, known), [ascii] = /^[A-Za-z0-9_.\-]*/.exec(word);
  if (known.has(fold(whole)) || !/^(?!\p{Script=Latin})\p{L}/u.test(word.slice(ascii.length))) return whole;
  const begin = withoutStops(ascii, known);
  return known.has(fold(begin)) ? begin : whole;
};

const withoutStops = (word, known) => {
  let name = word;
  while (name && !known.has(fold(name)) && /[.-]$/.test(name)) name = name.slice(0, -1);
  return name;
};
