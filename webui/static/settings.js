// The settings dialog. Everything in it is kept in this browser, for this user.
import { button, h } from './dom.js';
import { confirm, dialog, toast } from './ui.js';
import { exportAll } from './chats.js';
import { openChat } from './chat.js';
import * as store from './store.js';

const field = (id, label, input, hint) => h('div', { class: 'field' }, h('label', { for: id }, label), input, hint ? h('p', { class: 'hint', id: `${id}-hint` }, hint) : null);

const number = (id, key, { min, max, step }) => h('input', {
  id, type: 'number', min, max, step, value: store.settings[key], 'aria-describedby': `${id}-hint`,
  onchange: (event) => {
    const wanted = event.target.value === '' ? store.DEFAULTS[key] : Number(event.target.value);
    const value = Math.min(max, Math.max(min, wanted));
    event.target.value = value;
    store.keep({ [key]: value });
  },
});

const colours = () => h('select', { id: 'set-theme', onchange: (event) => store.keep({ theme: event.target.value }) },
  [['system', 'as the system has them'], ['light', 'light'], ['dark', 'dark']].map(([value, name]) => h('option', { value, selected: store.settings.theme === value }, name)));

/** A choice of presses; nothing where the server's engine has none. */
const compression = ({ presses }) => {
  if (!presses.length) return null;
  const chosen = presses.slice(1).some((one) => one.name === store.settings.press) ? store.settings.press : '';
  const options = presses.map(({ name, about }, i) => h('option', { value: i ? name : '', selected: (i ? name : '') === chosen, title: about }, i ? name : `${name}, the default`));
  return field('set-press', 'Compression of images and documents', h('select', { id: 'set-press', 'aria-describedby': 'set-press-hint', onchange: (event) => store.keep({ press: event.target.value }) }, options),
    'snapkv-50 removes half of their tokens from the compiled cache, with every policy that recomputes first tokens.');
};

const forget = async () => {
  if (!await confirm('Delete all chats?', 'All chats and drafts that this browser keeps for you are deleted. This cannot be undone; export them first if you may need them.', 'Delete all')) return;
  await openChat('');  // stops what is being answered, which would otherwise keep its chat again
  await store.clear();
  location.hash = '#chat';
  toast('All chats were deleted.');
};

/** Opens the settings. */
export const openSettings = (about) => dialog('Settings', h('div', { class: 'stack' },
  field('set-system', 'System prompt', h('textarea', { id: 'set-system', rows: 3, value: store.settings.system, 'aria-describedby': 'set-system-hint', onchange: (event) => store.keep({ system: event.target.value.trim() }) }),
    'Stands before every chat. Small models such as the demo model do not follow one.'),
  field('set-temperature', 'Temperature', number('set-temperature', 'temperature', { min: 0, max: 2, step: 0.1 }), '0 always gives the likeliest answer, so comparisons are fair.'),
  field('set-length', 'Longest answer, in tokens', number('set-length', 'length', { min: 1, max: Math.max(1, about.model.context_length), step: 1 }), 'Policy and searching are chosen below the question; those choices are kept too.'),
  compression(about),
  h('div', { class: 'field check' }, h('input', { type: 'checkbox', id: 'set-details', checked: store.settings.details, onchange: (event) => store.keep({ details: event.target.checked }) }),
    h('label', { for: 'set-details' }, 'Show what was reused under each new answer')),
  field('set-theme', 'Colours', colours()),
  h('div', { class: 'field' }, h('h3', {}, 'Chats'),
    h('p', { class: 'hint' }, `Chats, drafts and settings are kept in this browser for ${about.keyed ? `the user “${about.user}”` : 'this server'}, at most ${store.MOST_CHATS} chats. The server keeps no conversations.`),
    h('div', { class: 'row' }, button('Export all chats', exportAll), button('Delete all chats', forget, { class: 'button danger' })))));
