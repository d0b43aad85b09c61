// The library panel: the visitor's files with their states; uploads, new names, deletion that can be undone.
import { $, button, count, duration, fold, h, HANDLE, handleIn, iconButton, mention, picture, size } from './dom.js';
import { call, get, upload } from './api.js';
import { failed, menu, prompt, toast, undoable } from './ui.js';
import { open } from './viewer.js';
import { insert } from './composer.js';

const DAY = 86_400, SOON = 1000, LATE = 10_000, SELDOM = 60_000, GUESSES = 3;
export let files = [];
const hidden = new Set();  // deleted, but it can still be undone
const listeners = [];
export const onFiles = (act) => listeners.push(act);

/** The files with a handle, by the folded handle. */
export const known = () => new Map(files.filter((file) => file.handle).map((file) => [fold(file.handle), file]));

/** The files that a text names, by handle: what a turn remembers of them. */
export const mentioned = (text) => {
  const all = known(), out = {};
  for (const match of text.matchAll(HANDLE)) {
    const file = all.get(fold(handleIn(match[2], all)));
    if (file) out[file.handle] = { id: file.id, kind: file.kind };
  }
  return out;
};

const facts = (file) => [
  file.tokens && `${count(file.tokens, 'token')}${file.chunk_count > 1 ? ` in ${file.chunk_count} chunks` : ''}`, size(file.bytes), ...(file.tiers || []),
  file.expires_at && `expires in ${duration(file.expires_at - Date.now() / 1000)}`,
].filter(Boolean).join(' · ');

const change = async (file, changes) => {
  try {
    await call('PATCH', `/v1/files/${file.id}`, changes);
  } catch (error) { failed(error); }
  await refresh();
};

/** Asks for another handle. */
export const rename = async (file) => {
  const handle = await prompt('Rename', 'Handle', file.handle || '', (text) => {
    if (!/^[A-Za-z0-9_.-]{1,64}$/.test(text)) return 'A handle is 1 to 64 letters, digits, “_”, “.” or “-”.';
    const other = known().get(fold(text));
    return other && other.id !== file.id ? `You already have a file with the handle ${other.handle}.` : '';
  });
  if (handle && handle !== file.handle) await change(file, { handle });
};

/** Deletes a file; `undone` is called when that is taken back. */
export const remove = (file, undone = () => {}) => undoable(`${mention(file)} was deleted.`, {
  show: () => { hidden.add(file.id); draw(); },
  undo: () => { hidden.delete(file.id); draw(); undone(); },
  commit: async () => {
    try {
      await call('DELETE', `/v1/files/${file.id}`, undefined, { keepalive: true });
    } catch (error) {
      if (error.status !== 404) { hidden.delete(file.id); failed(error); }
    }
    refresh();
  },
});

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
  const shown = files.filter((file) => !hidden.has(file.id));
  const list = $('#file-list'), focused = list.contains(document.activeElement) ? document.activeElement.getAttribute('aria-label') : null;
  if (!list.querySelector('.menu:not([hidden])')) {  // an open menu is not pulled away
    list.replaceChildren(...shown.map(row));
    if (focused) list.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }
  $('#library-note').textContent = shown.length
    ? `${count(shown.length, 'file')}, ${size(shown.reduce((sum, file) => sum + file.bytes, 0))}`
    : 'Nothing here yet. Drop images or text files anywhere on this page.';
  for (const act of listeners) act();
};

let wait = SOON, asked = 0;
/** Asks for the files again. */
export const refresh = async () => {
  asked = Date.now();
  try {
    const { data } = await get('/v1/files');
    files = data;
    draw();
  } catch (error) {
    asked += LATE - SELDOM;  // sooner than usual
    if (error.status && error.status !== 401) $('#library-note').textContent = `The files could not be listed: ${error.message} This page asks again.`;
    // that there is no connection or no login, the page says elsewhere
  }
};

/** Asks often while something compiles, seldom otherwise, never on a hidden page. */
export const watchLibrary = () => {
  setInterval(() => {
    if (document.hidden) return;
    const compiling = files.some((file) => file.state === 'compiling');
    if (!compiling) wait = SOON;
    if (Date.now() - asked < (compiling ? wait : SELDOM)) return;
    if (compiling) wait = Math.min(2 * wait, LATE);
    refresh();
  }, 500);
};

// ---- uploads

const stem = (name) => name.replace(/\.[^.]*$/, '').toUpperCase().replace(/[^A-Z0-9]+/g, '_').replace(/^_+|_+$/g, '').slice(0, 56) || 'FILE';

/** A handle like `base` that none of the visitor's files has. The page may not know all of them, so after some were
 * `refused` one is made up. */
const freeHandle = (base, refused) => {
  if (refused.length >= GUESSES) return `${base}_${Math.random().toString(36).slice(2, 8).toUpperCase()}`;
  const taken = known();
  for (let n = 1; ; n++) {
    const wanted = n === 1 ? base : `${base}_${n}`;
    if (!taken.has(fold(wanted)) && !refused.includes(wanted)) return wanted;
  }
};

/** Uploads one file under a free handle, or under this one; returns what the server says of it, null if it refused. A
 * file that was refused stays with a button to try again, and then `added` is called. */
export const uploadFile = async (file, handle = '', added = refresh) => {
  const line = h('div', { class: 'upload' }), refused = [];
  $('#uploads').append(line);
  let wanted = handle || freeHandle(stem(file.name), refused);
  const attempt = async () => {
    const bar = h('progress', { max: 1, value: 0, 'aria-label': `uploading ${file.name}` });
    line.className = 'upload';
    line.removeAttribute('role');
    line.replaceChildren(h('span', {}, file.name), bar);
    for (;;) {
      try {
        const made = await upload('/v1/files', { purpose: 'user_data', handle: wanted, file }, (share) => { bar.value = share; });
        line.remove();
        wait = SOON;
        return made;
      } catch (error) {
        if (error.code !== 'handle_taken' || handle || refused.length > GUESSES) { refuse(error); return null; }
        refused.push(wanted);
        wanted = freeHandle(stem(file.name), refused);
      }
    }
  };
  const refuse = (error) => {
    const again = button('Try again', async () => { const made = await attempt(); if (made) await added(made); }, { class: 'button small' });
    line.classList.add('failed');
    line.setAttribute('role', 'alert');
    line.replaceChildren(h('span', {}, h('b', {}, file.name), ` ${error.message} [${error.code}]`), again, iconButton('close', 'Dismiss', () => line.remove()));
    toast(`${file.name} was not added: ${error.message}`, { bad: true });
  };
  return attempt();
};

const uploadAll = async (list) => {
  const added = async (made) => { await refresh(); insert(mention(made)); };
  for (const file of list) {
    const made = await uploadFile(file, '', added);
    if (made) await added(made);
  }
};

const hasFiles = (event) => [...(event.dataTransfer?.types || [])].includes('Files');
let depth = 0;
/** Connects the buttons, drops and pastes. */
export const startLibrary = () => {
  const input = $('#file-input');
  for (const id of ['#add-files', '#attach']) $(id).addEventListener('click', () => input.click());
  input.addEventListener('change', () => uploadAll([...input.files]).then(() => { input.value = ''; }));
  const over = (on) => document.body.classList.toggle('dropping', on);
  document.addEventListener('dragenter', (event) => { if (hasFiles(event)) { depth += 1; over(true); } });
  document.addEventListener('dragleave', (event) => { if (hasFiles(event) && --depth <= 0) { depth = 0; over(false); } });
  document.addEventListener('dragover', (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener('drop', (event) => {
    depth = 0;
    over(false);
    if (!hasFiles(event)) return;
    event.preventDefault();
    uploadAll([...event.dataTransfer.files]);
  });
  document.addEventListener('paste', (event) => {
    const pasted = [...(event.clipboardData?.files || [])];
    if (pasted.length) { event.preventDefault(); uploadAll(pasted.map((file) => (file.name ? file : new File([file], 'pasted.png', { type: file.type })))); }
  });
};
