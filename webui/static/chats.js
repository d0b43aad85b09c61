// The list of chats: open, rename, delete, export.
import { $, $$, h } from './dom.js';
import { download, failed, menu, prompt, undoable } from './ui.js';
import { chat, onChange, openChat, persist } from './chat.js';
import * as store from './store.js';

const hidden = new Set();
const place = (id) => (id ? `#chat/${id}` : '#chat');
const fileName = (title) => (title || 'chat').replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 60) || 'chat';

const asMarkdown = (one) => {
  const out = [`# ${one.title || 'Chat'}`, ''];
  for (const { text, answer, again } of one.turns) {
    out.push('## Question', '', text, '', `## Answer${answer.usage ? ` (${answer.usage.mpic.policy})` : ''}`, '', answer.text.trim() || `(${answer.error?.message || answer.state})`, '');
    if (again) out.push('## Answer without reuse', '', again.text.trim(), '');
  }
  return out.join('\n');
};

const found = async (id) => {
  const one = id === chat.current.id ? chat.current : await store.load(id);
  if (!one) throw new Error('This chat is not kept in this browser any more.');
  return one;
};
const exportChat = async (id, form) => {
  const one = await found(id);
  if (form === 'json') download(`${fileName(one.title)}.json`, JSON.stringify(one, null, 2), 'application/json');
  else download(`${fileName(one.title)}.md`, asMarkdown(one), 'text/markdown');
};
export const exportAll = async () =>
  download('mpic-chats.json', JSON.stringify(await store.list(), null, 2), 'application/json');

const rename = async (id) => {
  const one = await found(id);
  const title = await prompt('Rename the chat', 'Title', one.title, (text) => (text ? '' : 'A title has at least one letter.'));
  if (!title) return;
  Object.assign(one, { title, named: true, updated: Date.now() });
  if (one === chat.current) await persist();
  else await store.save(one).catch(failed);
  draw();
};

const remove = (one) => undoable(`“${one.title}” was deleted.`, {
  show: () => { hidden.add(one.id); draw(); if (chat.current.id === one.id) location.hash = '#chat'; },
  undo: () => { hidden.delete(one.id); draw(); location.hash = place(one.id); },
  commit: () => { hidden.delete(one.id); return store.remove(one.id).then(draw).catch(failed); },
});

const actions = (one) => [
  ['Rename', () => rename(one.id)], ['Export as Markdown', () => exportChat(one.id, 'md')],
  ['Export as JSON', () => exportChat(one.id, 'json')], ['Delete', () => remove(one), { bad: true }]];

let drawing = Promise.resolve();
/** Shows the list. */
export const draw = () => {
  drawing = drawing.then(async () => {
    const all = (await store.list()).filter((one) => !hidden.has(one.id)), list = $('#chat-list');
    $('#chats-empty').hidden = all.length > 0;
    if (list.querySelector('.menu:not([hidden])')) return;
    list.replaceChildren(...all.map((one) => h('li', { class: 'chat' },
      h('a', { href: place(one.id), 'aria-current': one.id === chat.current?.id ? 'page' : null, title: one.title }, one.title || 'Chat'),
      menu(`More about “${one.title}”`, () => actions(one)))));
  }).catch(failed);
  return drawing;
};

/** Shows the title and the menu of the open chat, and lets the links to the conversation lead to it. */
export const shown = () => {
  const { current } = chat;
  for (const link of $$('#side a[data-view=chat], #side .brand')) link.href = place(current.id);
  if ($('#view-chat').hidden) return;
  $('#title').textContent = current.title || 'New chat';
  document.title = current.title ? `${current.title} · MPIC` : 'MPIC';
  $('#chat-menu').replaceChildren(...(current.id ? [menu('This chat', () => actions(current))] : []));
  if (current.id && location.hash !== place(current.id) && (location.hash === '#chat' || !location.hash)) history.replaceState(null, '', place(current.id));
};

/** Connects the list. */
export const startChats = () => {
  let was = '';
  onChange(() => {
    const now = `${chat.current.id} ${chat.current.title} ${chat.current.turns.length}`;
    if (now === was) return;
    was = now;
    shown();
    draw();
  });
  $('#new-chat').addEventListener('click', () => { if (location.hash === '#chat') openChat(''); location.hash = '#chat'; });
};
