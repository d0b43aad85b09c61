// The pickers under the question: the policy, with what each does and costs, and the use of the reference library.
import { h, icon } from './dom.js';
import { announce, disclosure } from './ui.js';
import { get } from './api.js';
import { keep, settings } from './store.js';

const CHECK_MS = 250;
const costs = ({ lost, fewer }) => (fewer === null || fewer === undefined ? 'Not measured on the demo model.'
  : `On the demo model: ${lost > 0 ? `${lost.toFixed(1)} of 100 points` : 'no points'} lost, ${fewer.toFixed(1)} times fewer operations.`);

/** A picker with one line for each choice: {value, name, about, note}. `chosen` is called with what is chosen. */
const picker = (label, choices, current, chosen, more = {}) => {
  const shown = h('span', {}), list = h('ul', { role: 'listbox', 'aria-label': label, id: `list-${label.replace(/\W/g, '')}` });
  const opener = h('button', { type: 'button', class: 'button picker' }, h('span', { class: 'unseen' }, `${label}: `), shown, icon('down'));
  const status = h('p', { class: 'picker-status', role: 'status' });
  const field = h('input', {
    type: 'text', role: 'combobox', 'aria-label': more.filter || `${label}: arrow keys choose`, 'aria-expanded': 'true', 'aria-controls': list.id,
    'aria-autocomplete': 'list', autocomplete: 'off', spellcheck: 'false', readonly: !more.filter, placeholder: more.filter || '',
  });
  const panel = h('div', { class: 'picker-panel' }, field, status, list);
  let items = [], active = 0;
  const mark = () => {
    [...list.children].forEach((li, i) => li.classList.toggle('active', i === active));
    const li = list.children[active];
    field.setAttribute('aria-activedescendant', li?.id || '');
    li?.scrollIntoView({ block: 'nearest' });
  };
  const draw = (found) => {
    items = found;
    active = Math.max(0, items.findIndex((item) => item.value === current()));
    list.replaceChildren(...items.map((item, i) => h('li', {
      id: `${list.id}-${i}`, role: 'option', 'aria-selected': String(item.value === current()),
      onpointerdown: (event) => event.preventDefault(), onclick: () => choose(item),
    }, h('b', {}, item.name), h('span', {}, item.about), item.note ? h('small', {}, item.note) : null)));
    mark();
  };
  const choose = (item) => {
    if (!item) return;
    chosen(item.value);
    shown.textContent = item.name;
    announce(`${label}: ${item.name}`);
    made.close();
  };
  const made = disclosure(opener, panel, { onopen: () => { field.value = ''; status.textContent = ''; field.removeAttribute('aria-invalid'); draw(choices); field.focus(); } });
  field.addEventListener('keydown', (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && items.length) { active = (active + step + items.length) % items.length; mark(); }
    else if (event.key === 'Enter') choose(items[active]);
    else return;
    event.preventDefault();
  });
  if (more.filter) field.addEventListener('input', () => more.typed(field, status, draw));
  shown.textContent = (choices.find((item) => item.value === current()) || { name: current() }).name;
  made.root.show = () => { shown.textContent = (choices.find((item) => item.value === current()) || { name: current() }).name; };
  return made.root;
};

/** The policy picker. A name that is typed is checked by the server while it is typed. */
export const policyPicker = (about) => {
  const choices = about.policies.map((one, i) => ({ value: i ? one.name : '', name: one.name, about: one.about, note: i ? costs(one) : `The default. ${costs(one)}` }));
  let timer = 0;
  const typed = (field, status, draw) => {
    const text = field.value.trim();
    const found = choices.filter((item) => item.name.includes(text));
    field.removeAttribute('aria-invalid');
    status.textContent = '';
    draw(found);
    clearTimeout(timer);
    if (!text || found.length) return;
    timer = setTimeout(async () => {
      const answer = await get(`/policy?name=${encodeURIComponent(text)}`).catch((error) => ({ error: error.message }));
      if (field.value.trim() !== text) return;
      if (answer.error) { field.setAttribute('aria-invalid', 'true'); status.textContent = answer.error; }
      else draw([{ value: answer.name, name: answer.name, about: answer.about, note: 'Not measured on the demo model.' }]);
    }, CHECK_MS);
  };
  if (settings.policy === choices[0].name) keep({ policy: '' });
  return picker('Policy', choices, () => settings.policy, (policy) => keep({ policy }), { filter: 'Another policy, such as mpic-24', typed });
};

export const retrievalPicker = (about) => {
  const choices = Object.entries(about.retrieval).map(([value, [name, text]]) => ({ value, name, about: text }));
  return picker('Reference library', choices, () => settings.retrieval, (retrieval) => keep({ retrieval }));
};
