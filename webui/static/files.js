// The visitor's files with their states: asked for again while they change, renamed, and deleted so that it can be undone.
import { fold, HANDLE, handleIn, mention } from './dom.js';
import { call, get } from './api.js';
import { failed, prompt, undoable } from './ui.js';

const SOON = 1000, LATE = 10_000, SELDOM = 60_000;
export let files = [];
export let trouble = '';  // why they could not be listed, of the last time
let listed = { at: 0, whole: false };  // when the server was asked for the files, and whether it named all of them
const hidden = new Set();  // deleted, but it can still be undone
const listeners = [];
/** Calls `act` whenever the files have changed, or could not be listed. */
export const onFiles = (act) => listeners.push(act);
const changed = () => { for (const act of listeners) act(); };

/** The files that are to be seen. */
export const shown = () => files.filter((file) => !hidden.has(file.id));

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

/** The text of a turn with the handles that its files have now. A file that is gone leaves its plain name, because its
 * handle is refused, or by now another file has it; with `keepGone` it leaves the handle. So does a file that may still be
 * there: another tab may have added it after this page asked for the files, and of very many only the newest are listed. */
export const withHandlesOfNow = (turn, keepGone = false) => {
  const then = new Map(Object.entries(turn.files || {}).map(([handle, { id }]) => [fold(handle), id])), all = known();
  return turn.text.replace(HANDLE, (whole, kind, word) => {
    const name = handleIn(word, then), id = then.get(fold(name));
    if (!id) return whole;
    const file = files.find((one) => one.id === id), handle = file?.handle;
    const gone = !handle && listed.at > turn.changed && (listed.whole || file || all.has(fold(name)));
    if (handle ? fold(handle) === fold(name) : keepGone || !gone) return whole;
    return (handle ? `${kind}#${handle}` : name) + word.slice(name.length);
  });
};

/** Changes a file on the server. */
export const change = async (file, changes) => {
  try {
    await call('PATCH', `/v1/files/${file.id}`, changes);
  } catch (error) { failed(error); }
  await refresh();
};

/** Asks for another handle. */
export const rename = async (file) => {
  const handle = await prompt('Rename', 'Handle', file.handle || '', (text) => {
    if (!/^(?!\p{M})(?=.*[\p{L}\p{N}])[\p{L}\p{N}\p{M}_.-]{1,64}$/u.test(text)) return 'A handle is 1 to 64 letters of any script, digits, “_”, “.” or “-”, with a letter or digit at least.';
    const other = known().get(fold(text));
    return other && other.id !== file.id ? `You already have a file with the handle ${other.handle}.` : '';
  });
  if (handle && handle !== file.handle) await change(file, { handle });
};

/** Deletes a file; `undone` is called when that is taken back. */
export const remove = (file, undone = () => {}) => undoable(`${mention(file)} was deleted.`, {
  show: () => { hidden.add(file.id); changed(); },
  undo: () => { hidden.delete(file.id); changed(); undone(); },
  commit: async () => {
    try {
      await call('DELETE', `/v1/files/${file.id}`, undefined, { keepalive: true });
    } catch (error) {
      if (error.status !== 404) { hidden.delete(file.id); failed(error); }
    }
    refresh();
  },
});

let wait = SOON, asked = 0;
/** Asks for the files again. */
export const refresh = async () => {
  const at = Date.now();
  asked = at;
  try {
    const { data, has_more: more } = await get('/v1/files');
    [files, trouble, listed] = [data, '', { at, whole: !more }];
    changed();
  } catch (error) {
    asked += LATE - SELDOM;  // sooner than usual
    if (error.status && error.status !== 401) {  // that there is no connection or no login, the page says elsewhere
      trouble = `The files could not be listed: ${error.message} This page asks again.`;
      changed();
    }
  }
};

/** Asks often while something compiles, seldom otherwise, never on a hidden page. */
export const watchFiles = () => {
  setInterval(() => {
    if (document.hidden) return;
    const compiling = files.some((file) => file.state === 'compiling');
    if (!compiling) wait = SOON;
    if (Date.now() - asked < (compiling ? wait : SELDOM)) return;
    if (compiling) wait = Math.min(2 * wait, LATE);
    refresh();
  }, 500);
};

/** Asks again soon, as after an upload. */
export const expectChange = () => { wait = SOON; };
