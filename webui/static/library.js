// The library panel: a row for each of the visitor's files.
import { $, count, duration, h, mention, picture, size } from './dom.js';
import { menu } from './ui.js';
import { insert } from './box.js';
import { change, onFiles, remove, rename, shown, trouble } from './files.js';
import { open } from './viewer.js';

const DAY = 86_400;

const facts = (file) => [
  file.tokens && `${count(file.tokens, 'token')}${file.chunk_count > 1 ? ` in ${file.chunk_count} chunks` : ''}`, size(file.bytes), ...(file.tiers || []),
  file.expires_at && `expires in ${duration(file.expires_at - Date.now() / 1000)}`,
].filter(Boolean).join(' · ');

const row = (file) => h('li', { class: 'file', data: { handle: file.handle || '', state: file.state, id: file.id } },
  h('button', { type: 'button', class: 'open', onclick: () => open(file), 'aria-label': `Open ${mention(file)}` }, picture(file)),
  h('button', { type: 'button', class: 'use', onclick: () => insert(mention(file)), title: `Put ${mention(file)} into the question` },
    h('b', {}, file.handle || file.filename), h('small', {}, file.state === 'ready' ? facts(file) : file.state)),
  menu(`More about ${mention(file)}`, () => [
    ['Put into the question', () => insert(mention(file))], ['Open', () => open(file)], ['Rename', () => rename(file)],
    file.expires_at && ['Keep for another day', () => change(file, { ttl: Math.max(0, Math.round(file.expires_at - Date.now() / 1000)) + DAY })],
    ['Delete', () => remove(file), { bad: true }]]),
  (file.state === 'failed' || file.status_details) && h('p', { class: 'field-error' }, file.status_details || 'It could not be compiled.'));

const draw = () => {
  const files = shown();
  const list = $('#file-list'), focused = list.contains(document.activeElement) ? document.activeElement.getAttribute('aria-label') : null;
  if (!list.querySelector('.menu:not([hidden])')) {  // an open menu is not pulled away
    list.replaceChildren(...files.map(row));
    if (focused) list.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }
  $('#library-note').textContent = trouble || (files.length
    ? `${count(files.length, 'file')}, ${size(files.reduce((sum, file) => sum + file.bytes, 0))}`
    : 'Nothing here yet. Drop images or text files anywhere on this page.');
};

/** Draws the panel whenever the files have changed. */
export const startLibrary = () => onFiles(draw);
