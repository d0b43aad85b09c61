// Uploads by button, drop and paste.
import { $, button, fold, h, iconButton, mention } from './dom.js';
import { upload } from './api.js';
import { announce, toast } from './ui.js';
import { insert } from './box.js';
import { expectChange, known, refresh } from './files.js';

const GUESSES = 3;

const stem = (name) => {
  const kept = fold(name.replace(/\.[^.]*$/, '')).replace(/[^\p{L}\p{N}\p{M}]+/gu, '_').replace(/^[_\p{M}]+|_+$/gu, '');
  return [...kept].slice(0, 56).join('') || 'FILE';
};

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

/** Shows what is uploaded above the question, where the library is out of sight. */
export const placeUploads = (aboveQuestion) => {
  if (aboveQuestion) $('#chips').before($('#uploads'));
  else $('#file-list').before($('#uploads'));
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
    announce(`Adding ${file.name}.`);
    for (;;) {
      try {
        const made = await upload('/v1/files', { purpose: 'user_data', handle: wanted, file }, (share) => { bar.value = share; });
        line.remove();
        announce(`Added ${mention(made)}.`);
        expectChange();
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
const takenByField = (event) => event.target.matches?.('input[type=file]');  // the browser puts the file into it
let depth = 0;
/** Connects the buttons, drops and pastes. */
export const startUploads = () => {
  const input = $('#file-input');
  for (const id of ['#add-files', '#attach']) $(id).addEventListener('click', () => input.click());
  input.addEventListener('change', () => uploadAll([...input.files]).then(() => { input.value = ''; }));
  const over = (on) => document.body.classList.toggle('dropping', on);
  document.addEventListener('dragenter', (event) => { if (hasFiles(event)) { depth += 1; over(true); } });
  document.addEventListener('dragleave', (event) => { if (hasFiles(event) && --depth <= 0) { depth = 0; over(false); } });
  document.addEventListener('dragover', (event) => { if (hasFiles(event) && !takenByField(event)) event.preventDefault(); });
  document.addEventListener('drop', (event) => {
    depth = 0;
    over(false);
    if (!hasFiles(event) || takenByField(event)) return;
    event.preventDefault();
    uploadAll([...event.dataTransfer.files]);
  });
  document.addEventListener('paste', (event) => {
    const types = event.clipboardData?.types || [];
    // cells and paragraphs come as text, as a page and as a picture of themselves; the text is meant
    if (types.includes('text/plain') && types.includes('text/html')) return;
    const pasted = [...(event.clipboardData?.files || [])];
    if (pasted.length) { event.preventDefault(); uploadAll(pasted.map((file) => (file.name ? file : new File([file], 'pasted.png', { type: file.type })))); }
  });
};
