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

/** Returns why the server did not accept a login, in its own words, which are in the page that it answers with. */
async function refusal(answer) {
  if (!answer) return 'The server cannot be reached.';
  const page = new DOMParser().parseFromString(await answer.text().catch(() => ''), 'text/html');
  return page.querySelector('[role=alert]')?.textContent || `The server did not accept the login (status ${answer.status}).`;
}

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
        error.textContent = await refusal(answer);
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
