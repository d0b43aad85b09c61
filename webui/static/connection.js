// Whether the server is there, and who is logged in: asked every few seconds while the page is visible, and said in
// words until it is well again.
import { $, button, h } from './dom.js';
import { announce, dialog } from './ui.js';
import { get, send, watch } from './api.js';

const CALM = 4000, SOON = 1000, LONG = 8000;
const DOWN = 'The server cannot be reached; it may be restarting. This page tries again every second. Nothing you wrote is lost.';

let state = 'ok', timer = 0, user = null, asking = false;
const back = [];
/** Calls a function whenever the server is there again after it was away. */
export const onBack = (act) => back.push(act);
export const away = () => state !== 'ok';

const show = (next, text = '') => {
  const was = state;
  state = next;
  const notice = $('#notice');
  if (next === 'ok') {
    notice.hidden = true;
    if (was !== 'ok') {
      announce('The server is back.');
      for (const act of back) act();
    }
    return;
  }
  notice.hidden = false;
  if (notice.firstChild?.textContent === text) return;
  notice.replaceChildren(h('span', {}, text), next === 'out' ? button('Log in', login, { class: 'button small' }) : '');
};

const look = async () => {
  if (asking) return;
  asking = true;
  const abort = new AbortController(), late = setTimeout(() => abort.abort(), LONG);
  try {
    const answer = await (await send('/alive', { signal: abort.signal })).json();
    if (user !== null && answer.user !== user) return location.reload();  // somebody else has logged in, perhaps in another tab
    if (answer.ready) show('ok');
    else show('unready', `The server is running, but not ready: ${answer.message} This page tries again.`);
  } catch (error) {
    if (error.status === 401) show('out', 'You are logged out: the login has ended, or the key was revoked. What you wrote is kept.');
    else if (error.status) show('unready', `The server is running, but not ready: ${error.message} This page tries again.`);
    else show('down', DOWN);
  }
  clearTimeout(late);
  asking = false;
  return later();
};
const later = () => {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(look, state === 'down' || state === 'unready' ? SOON : CALM);
};

const REFUSALS = {
  401: 'This key is not known here, or it was revoked.',
  403: 'Log in over https or from this machine: a key must not cross a network in the clear.',
  429: 'Too many requests were made with this key. Try again in a minute.',
};
const refusal = (answer) => (answer
  ? REFUSALS[answer.status] || `The server did not accept the login (status ${answer.status}).`
  : 'The server cannot be reached.');

/** Logs in without leaving the page. Somebody else gets a page of their own. */
function login() {
  if ($('#key')) return;
  const key = h('input', { id: 'key', type: 'password', autocomplete: 'current-password', spellcheck: 'false', required: true });
  const error = h('p', { class: 'field-error', role: 'alert' });
  const made = dialog('Log in again', h('form', {
    onsubmit: async (event) => {
      event.preventDefault();
      const body = new URLSearchParams({ key: key.value });
      const answer = await fetch('/ui/login', { method: 'POST', body, redirect: 'manual' }).catch(() => null);
      if (answer?.type !== 'opaqueredirect') {
        error.textContent = refusal(answer);
        return;
      }
      const about = await get('/about').catch(() => null);
      if (about?.user !== user) location.reload();
      made.close();
      look();
    },
  }, h('label', { for: 'key' }, 'API key'), key, error, h('div', { class: 'row end' }, h('button', { class: 'button primary' }, 'Log in'))));
  key.focus();
}

/** Begins to watch the connection. `who` is the user of this page. */
export const watchConnection = (who) => { user = who; later(); };

watch((what) => {
  if (what === 'lost' && state === 'ok') { show('down', DOWN); later(); }
  if (what === 'out' && state !== 'out') look();
});
document.addEventListener('visibilitychange', () => { if (!document.hidden) look(); });
addEventListener('online', look);
