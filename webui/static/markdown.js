// Markdown of models as elements: paragraphs, headings, lists, quotes, code, tables, emphasis. No HTML, no pictures;
// a link is shown with its address, and only to http and https.
import { h } from './dom.js';

const INLINE = [
  [/^`([^`]+)`/, (m) => h('code', {}, m[1])],
  [/^\*\*(?=\S)(.+?)\*\*/s, (m) => h('strong', {}, inline(m[1]))],
  [/^\*(?=\S)([^*]+?)\*/s, (m) => h('em', {}, inline(m[1]))],
  [/^\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/, (m) => h('a', { href: m[2], rel: 'noopener noreferrer', target: '_blank' }, m[1] === m[2] ? m[1] : `${m[1]} (${m[2]})`)],
  [/^\\([\\`*_[\]#|-])/, (m) => m[1]],
];

/** Emphasis, code and links within a line. */
export function inline(text) {
  const out = [];
  let plain = '';
  for (let at = 0; at < text.length;) {
    const rest = text.slice(at);
    let found = null;
    if ('`*[\\'.includes(text[at])) {
      for (const [pattern, make] of INLINE) {
        const match = pattern.exec(rest);
        if (match) { found = [match[0].length, make(match)]; break; }
      }
    }
    if (found) {
      out.push(plain, found[1]);
      plain = '';
      at += found[0];
    } else if (text[at] === '\n') {
      out.push(plain, h('br'));
      plain = '';
      at += 1;
    } else plain += text[at++];
  }
  out.push(plain);
  return out.filter((piece) => piece !== '');
}

const BULLET = /^\s{0,3}[-*+]\s+(.*)$/, NUMBER = /^\s{0,3}(\d{1,9})[.)]\s+(.*)$/, FENCE = /^\s{0,3}(`{3,}|~{3,})/;
const HEADING = /^(#{1,6})\s+(.*)$/, QUOTE = /^\s{0,3}>\s?(.*)$/, RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const SEPARATOR = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)+\|?\s*$/;
const MOST_QUOTES = 8;  // within each other; a model that repeats itself writes thousands
const starts = (line) => [BULLET, NUMBER, FENCE, HEADING, QUOTE, RULE].some((pattern) => pattern.test(line));
const cells = (line) => line.trim().replace(/^\||\|$/g, '').split('|').map((cell) => cell.trim());

class Lines {
  constructor(lines) { this.lines = lines; this.at = 0; }
  get more() { return this.at < this.lines.length; }
  get here() { return this.lines[this.at]; }
  /** Takes the lines as long as they match; returns what the pattern found, or the lines. */
  take(matches) {
    const found = [];
    while (this.more) {
      const match = matches(this.here);
      if (!match) break;
      found.push(match);
      this.at += 1;
    }
    return found;
  }
}

const items = (found) => found.map((match) => h('li', {}, inline(match.at(-1))));
const bullets = (lines) => h('ul', {}, items(lines.take((line) => BULLET.exec(line))));
/** A numbered list. What stands between its items ends it, so the next one begins with the number it has in the text. */
const numbered = (lines) => {
  const found = lines.take((line) => NUMBER.exec(line)), first = Number(found[0][1]);
  return h('ol', { start: first === 1 ? null : first }, items(found));
};

const table = (lines) => {
  const head = cells(lines.here);
  lines.at += 2;
  const rows = lines.take((line) => line.includes('|') && [line]).map(([line]) => cells(line));
  return h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Table' }, h('table', {},
    h('thead', {}, h('tr', {}, head.map((cell) => h('th', {}, inline(cell))))),
    h('tbody', {}, rows.map((row) => h('tr', {}, row.map((cell) => h('td', {}, inline(cell))))))));
};

const code = (lines) => {
  const fence = FENCE.exec(lines.here)[1];
  lines.at += 1;
  const body = lines.take((line) => !line.trim().startsWith(fence) && [line]).map(([line]) => line);
  lines.at += 1;
  return h('pre', { tabindex: '0' }, h('code', {}, body.join('\n')));
};

const block = (lines, depth) => {
  const line = lines.here;
  if (FENCE.test(line)) return code(lines);
  if (RULE.test(line)) { lines.at += 1; return h('hr'); }
  const heading = HEADING.exec(line);
  if (heading) { lines.at += 1; return h(`h${Math.min(6, heading[1].length + 1)}`, {}, inline(heading[2])); }
  if (QUOTE.test(line) && depth < MOST_QUOTES) return h('blockquote', {}, markdown(lines.take((l) => QUOTE.exec(l)).map((m) => m[1]).join('\n'), depth + 1));
  if (BULLET.test(line)) return bullets(lines);
  if (NUMBER.test(line)) return numbered(lines);
  if (line.includes('|') && SEPARATOR.test(lines.lines[lines.at + 1] || '')) return table(lines);
  let first = true;
  const words = lines.take((l) => (l.trim() && (first || !starts(l)) ? [((first = false), l)] : null));
  return h('p', {}, inline(words.map(([l]) => l.trimEnd()).join('\n')));
};

/** Returns the elements of a text; `depth` is how many quotes it stands in. */
export function markdown(text, depth = 0) {
  const lines = new Lines(text.replace(/\r\n?/g, '\n').split('\n')), out = [];
  while (lines.more) {
    if (lines.here.trim()) out.push(block(lines, depth));
    else lines.at += 1;
  }
  return out;
}
