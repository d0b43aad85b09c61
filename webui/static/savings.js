// The savings page: tokens that were not computed, the time and the money that saved, over time; and what is never reused.
import { $, button, count, date, h, ms, size, svg } from './dom.js';
import { get } from './api.js';
import { announce, failed } from './ui.js';
import { keep, settings } from './store.js';
import { open } from './viewer.js';
import { files, remove } from './files.js';

const RANGES = [[7, '7 days'], [30, '30 days'], [90, '90 days'], [365, 'a year']];
const DAY = 86_400_000, HIGH = 120, WIDE = 640;
const number = (n) => n.toLocaleString('en');
const percent = (part, whole) => `${whole ? Math.round((100 * part) / whole) : 0} %`;
let days = 30, scope = 'mine', place = null, who = null;

const timeOf = (seconds) => (seconds < 120 ? ms(1000 * seconds) : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`);
const money = (tokens) => `${settings.currency}${((tokens / 1e6) * settings.price).toLocaleString('en', { minimumFractionDigits: 2, maximumFractionDigits: settings.price * tokens < 1e4 ? 4 : 2 })}`;

const tile = (name, value, meaning) => h('div', { class: 'tile' }, h('span', {}, name), h('b', {}, value), h('small', {}, meaning));

/** Bars of each day: tokens saved in front of tokens of prompts. Days without answers are empty. */
const chart = (found) => {
  const byDay = new Map(found.days.map((day) => [day.day, day])), all = [];
  for (let i = days - 1; i >= 0; i--) all.push(new Date(Date.now() - i * DAY).toISOString().slice(0, 10));
  const most = Math.max(1, ...found.days.map((day) => day.prompt_tokens)), step = WIDE / all.length, wide = Math.max(1, step * 0.7);
  const bars = all.map((day, i) => {
    const one = byDay.get(day);
    if (!one) return null;
    const bar = (tokens, name) => { const tall = Math.max(1, (HIGH * tokens) / most); return svg('rect', { class: name, x: i * step, y: HIGH - tall, width: wide, height: tall, rx: Math.min(3, wide / 3) }); };
    return svg('g', {}, svg('title', {}, `${day}: ${number(one.saved_tokens)} of ${number(one.prompt_tokens)} tokens not computed`), bar(one.prompt_tokens, 'bar-all'), bar(one.saved_tokens, 'bar-saved'));
  });
  const label = `Tokens of each day: ${number(found.total.saved_tokens)} of ${number(found.total.prompt_tokens)} were not computed`;
  return h('figure', { class: 'panel chart' },
    h('figcaption', {}, h('span', { class: 'key bar-saved' }), 'not computed ', h('span', { class: 'key bar-all' }), 'computed, of all tokens of prompts'),
    svg('svg', { viewBox: `0 0 ${WIDE} ${HIGH}`, role: 'img', 'aria-label': label, preserveAspectRatio: 'none' }, bars),
    h('div', { class: 'axis' }, h('span', {}, all[0]), h('span', {}, 'today')),
    h('details', {}, h('summary', {}, 'As a table'), table(['Day', 'Answers', 'Tokens of prompts', 'Not computed'],
      found.days.map((day) => [day.day, number(day.answers), number(day.prompt_tokens), number(day.saved_tokens)]))));
};

const table = (heads, rows) => h('div', { class: 'scroll', tabindex: '0', role: 'region', 'aria-label': heads[0] },
  h('table', { class: 'table' }, h('thead', {}, h('tr', {}, heads.map((head) => h('th', { scope: 'col' }, head)))),
    h('tbody', {}, rows.map((row) => h('tr', {}, row.map((cell) => h('td', {}, cell)))))));

const unused = (found) => {
  const never = found.items.filter((item) => !item.uses), noun = scope === 'all' ? 'reference' : 'file';
  const heading = h('h3', {}, 'Never reused'), oldest = found.more_items ? ` This looks at the ${number(found.items.length)} oldest ${noun}s only.` : '';
  if (!found.items.length) return [heading, h('p', { class: 'hint' }, `There are no ${noun}s.`)];
  if (!never.length) return [heading, h('p', { class: 'hint' }, `Every ${noun} was reused at least once.${oldest}`)];
  const since = found.since ? ` since ${date(found.since)}, when counting began` : '';
  return [heading, h('p', { class: 'hint' }, `${count(never.length, noun)}, ${size(never.reduce((sum, item) => sum + item.bytes, 0))}: no answer has reused these${since}. They could go.${oldest}`),
    h('ul', { class: 'side-list unused' }, never.slice(0, 100).map((item) => h('li', { class: 'row' },
      button(item.name, () => open(scope === 'all' ? { reference: item.id } : { id: item.id, handle: item.name }), { class: 'button quiet' }),
      h('small', {}, `${size(item.bytes)} · added ${date(item.created_at)}`), h('span', { class: 'grow' }),
      scope === 'mine' && button('Delete', (event) => {
        const row = event.target.closest('li');
        row.hidden = true;
        remove(files.find((file) => file.id === item.id) || { id: item.id, filename: item.name }, () => { row.hidden = false; });
      }, { class: 'button small danger', 'aria-label': `Delete ${item.name}` }))))];
};

const mostReused = (found) => {
  const used = found.items.filter((item) => item.uses).sort((a, b) => b.saved_tokens - a.saved_tokens).slice(0, 20);
  return used.length ? [h('h3', {}, 'Reused most'), table(['Name', 'Answers', 'Tokens not computed', 'Last'],
    used.map((item) => [item.name, number(item.uses), number(item.saved_tokens), date(item.last_used)]))] : [];
};

const fill = (found) => {
  const { total } = found, saved = total.saved_tokens;
  const seconds = found.ms_per_token === null ? null : (saved * found.ms_per_token) / 1000;
  const price = h('input', { type: 'number', id: 'price', min: 0, step: 'any', value: settings.price || '', 'aria-describedby': 'price-hint' });
  const value = h('div', { class: 'tile' }, h('span', {}, 'Money saved'), h('b', { id: 'money' }), h('small', {}, 'at the price below'));
  const showMoney = () => { $('#money', value).textContent = settings.price ? money(saved) : 'set a price'; };
  price.addEventListener('input', () => { keep({ price: Math.max(0, Number(price.value) || 0) }); showMoney(); });
  showMoney();
  place.replaceChildren(
    h('div', { class: 'tiles' }, tile('Tokens not computed', number(saved), `of ${number(total.prompt_tokens)} in ${count(total.answers, 'answer')}`),
      tile('Share reused', percent(saved, total.prompt_tokens), 'of all tokens of prompts'),
      tile('Time saved', seconds === null ? 'not known yet' : timeOf(seconds), seconds === null ? 'ask a few questions, also without reuse' : `${ms(found.ms_per_token)} for each token, fitted to this server's answers`), value),
    chart(found),
    h('div', { class: 'field narrow' }, h('label', { for: 'price' }, 'Price of a million tokens of prompts, in $'), price, h('p', { class: 'hint', id: 'price-hint' }, 'Kept in this browser.')),
    ...(found.users.length ? [h('h3', {}, 'Users'), table(['User', 'Answers', 'Tokens of prompts', 'Not computed', 'Share'],
      found.users.map((user) => [user.user, number(user.answers), number(user.prompt_tokens), number(user.saved_tokens), percent(user.saved_tokens, user.prompt_tokens)]))] : []),
    ...unused(found), ...mostReused(found));
};

const load = async () => {
  try {
    fill(await get(`/v1/savings?days=${days}&scope=${scope}`));
    announce('The savings were loaded.');
  } catch (error) { failed(error); }
};

const select = (id, label, choices, value, chosen) => h('div', { class: 'field' }, h('label', { for: id }, label),
  h('select', { id, onchange: (event) => { chosen(event.target.value); load(); } }, choices.map(([key, name]) => h('option', { value: key, selected: String(key) === String(value) }, name))));

/** Fills the page once, and asks for the figures whenever it is opened. */
export const showSavings = (about) => {
  if (!who) {
    who = about;
    place = h('div', { id: 'savings' });
    $('#view-savings').replaceChildren(h('h2', {}, 'What reuse has saved'),
      h('p', { class: 'lead' }, 'Tokens of your prompts that were not computed because they were compiled before, or stood in the prefix cache.'),
      h('div', { class: 'row' }, select('range', 'Time', RANGES, days, (value) => { days = Number(value); }),
        about.role === 'admin' ? select('scope', 'Of', [['mine', 'my answers'], ['all', 'all users, and the references']], scope, (value) => { scope = value; }) : ''), place);
  }
  return load();
};
