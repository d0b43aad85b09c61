// The box for a question: chips of what it names, pickers, drafts that survive.
import { $, HANDLE, composing, fold, h, handleIn, iconButton, picture } from './dom.js';
import { ask, busy, chat, onChange, stop } from './chat.js';
import { box, write } from './box.js';
import { completeHandles } from './completion.js';
import * as files from './files.js';
import * as store from './store.js';
import { failed, toast } from './ui.js';

const KEEP_MS = 300;

const fit = () => {
  box().style.height = 'auto';
  box().style.height = `${Math.min(box().scrollHeight + 2, innerHeight * 0.35)}px`;
};

const removeMention = (kind, name) => {
  const known = files.known();
  const left = box().value.replace(HANDLE, (whole, k, word) => {
    const other = handleIn(word, known);
    return k === kind && fold(other) === fold(name) ? word.slice(other.length) : whole;
  });
  const text = left.replace(/ {2,}/g, ' ').trimStart();
  write(box(), text, text.length);
};

/** Shows the files that the question names. */
export const showChips = () => {
  const known = files.known(), seen = new Set(), chips = [];
  for (const match of box().value.matchAll(HANDLE)) {
    const name = handleIn(match[2], known), file = known.get(fold(name));
    if (!name || seen.has(fold(name))) continue;
    if (!file && box().selectionStart === match.index + match[0].length && document.activeElement === box()) continue;  // being typed
    seen.add(fold(name));
    chips.push(h('span', { class: `chip${file ? '' : ' unknown'}` }, picture(file || {}), file ? name : `${name}: no such handle`,
      iconButton('close', `Take ${name} out of the question`, () => removeMention(match[1], name), { class: 'chip-x' })));
  }
  $('#chips').replaceChildren(...chips);
};

let timer = 0, place = null, shownChat = null, unkept = false;
/** Keeps what was typed here, if anything was: another tab may have a newer draft of the same chat. */
const keepDraft = () => {
  if (!timer) return;
  clearTimeout(timer);
  timer = 0;
  const kept = store.keepDraft(place, box().value);
  if (!kept && !unkept) toast('This browser has no room for this draft. It is there until you close or reload the page.', { bad: true });
  unkept = !kept;
};

/** Shows the draft of the chat that is open now. */
export const showDraft = () => {
  if (place === chat.current.id && shownChat?.id === place) return;  // what stands in the box is newer
  keepDraft();  // of the chat before
  place = chat.current.id;
  shownChat = chat.current;
  box().value = store.draft(place);
  fit();
  showChips();
};

/** Has what stands in the box go on as a draft of a new chat, which is open now: its own chat is gone. Another tab that
 * showed the chat may have seen to that. */
export const keepForNew = () => {
  clearTimeout(timer);
  const kept = store.draft(''), own = box().value;
  const text = `\n${kept}`.endsWith(`\n${own}`) ? kept : [kept, own].filter((one) => one.trim()).join('\n');
  place = '';
  shownChat = chat.current;
  box().value = text;
  timer = setTimeout(keepDraft, 0);
  fit();
  showChips();
};

const submit = (event) => {
  event?.preventDefault();
  const text = box().value.trim();
  if (!text || busy()) return;
  clearTimeout(timer);
  timer = 0;
  box().value = '';
  fit();
  showChips();
  store.keepDraft(place, '');
  const asked = ask(text);
  asked.then(() => {
    const turn = chat.current.turns.at(-1);
    if (turn?.text === text && turn.answer.state === 'failed' && !turn.answer.text && !box().value) write(box(), text, text.length);  // to be mended
  }).catch(failed);
};

const shown = () => {
  $('#send').hidden = busy();
  $('#stop').hidden = !busy();
  if (!place && !chat.current.id) shownChat = chat.current;  // another new chat took the place of the one before
  if (chat.current === shownChat && chat.current.id && !place) { store.keepDraft('', ''); place = chat.current.id; }  // the new chat has got its name
};

/** Connects the box. */
export const startComposer = () => {
  const area = box();
  completeHandles(area, () => files.files);
  area.addEventListener('input', () => {
    fit();
    showChips();
    clearTimeout(timer);
    timer = setTimeout(keepDraft, KEEP_MS);
  });
  area.addEventListener('keydown', (event) => {
    if (event.key === 'Enter' && !event.shiftKey && !composing(event)) submit(event);
  });
  addEventListener('pagehide', keepDraft);
  $('#composer').addEventListener('submit', submit);
  $('#stop').addEventListener('click', () => { stop(); area.focus(); });
  onChange(shown);
  files.onFiles(showChips);
};
