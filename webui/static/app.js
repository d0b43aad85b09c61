// The page: what is shown at which address, and what begins when.
import { $, $$, h, icon } from './dom.js';
import { ApiError, askFor, get } from './api.js';
import { failed, settle, toast } from './ui.js';
import * as store from './store.js';
import { onBack, watchConnection } from './connection.js';
import { chat, endRuns, learn, openChat, takeOver } from './chat.js';
import * as chats from './chats.js';
import { keepForNew, showDraft, startComposer } from './composer.js';
import { refresh as refreshFiles, watchFiles } from './files.js';
import { startLibrary } from './library.js';
import { notePolicies } from './runs.js';
import { policyPicker, retrievalPicker } from './picker.js';
import { showGuide } from './guide.js';
import { showReferences } from './references.js';
import { showSavings } from './savings.js';
import { openSettings } from './settings.js';
import { watchScrolling } from './scrolling.js';
import { watchServer } from './live.js';
import { placeUploads, startUploads } from './uploads.js';
import { showWelcome } from './welcome.js';

store.theme();
for (const [id, name] of [['side-open', 'menu'], ['side-close', 'close'], ['settings-open', 'settings'], ['attach', 'attach']]) $(`#${id}`).append(icon(name));

// ---- the drawer of small screens

const narrow = matchMedia('(max-width: 899px)');
const drawer = (open) => {
  const small = narrow.matches;
  document.body.classList.toggle('drawer-open', small && open);
  $('#side').inert = small && !open;
  $('#frame').inert = small && open;
  $('#backdrop').hidden = !(small && open);
  $('#side-open').setAttribute('aria-expanded', String(small && open));
  placeUploads(small && !open);
};
const closeDrawer = () => {
  const was = document.body.classList.contains('drawer-open');
  drawer(false);
  if (was) $('#side-open').focus();
};
narrow.addEventListener('change', () => drawer(false));
drawer(false);
$('#side-open').addEventListener('click', () => { drawer(true); $('#side-close').focus(); });
$('#side-close').addEventListener('click', closeDrawer);
$('#backdrop').addEventListener('click', closeDrawer);
$('#side').addEventListener('click', (event) => { if (event.target.closest('a, #new-chat, .use')) closeDrawer(); });
$('#side').addEventListener('keydown', (event) => { if (event.key === 'Escape') closeDrawer(); });

$('.skip').addEventListener('click', (event) => { event.preventDefault(); $('#main').focus(); });

// ---- addresses: #chat, #chat/ID, #references, #savings, #policies

const views = { references: showReferences, savings: showSavings, policies: showGuide };
const show = async (about) => {
  const [name, id = ''] = location.hash.slice(1).split('/');
  const view = name in views ? name : 'chat';
  for (const section of $$('.view')) section.hidden = section.id !== `view-${view}`;
  for (const link of $$('#views a')) {
    if (link.dataset.view === view) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  if (view !== 'chat') {
    $('#title').textContent = $(`#views [data-view=${view}]`).textContent;
    $('#chat-menu').replaceChildren();
    return views[view](about);
  }
  if (!await openChat(id)) {
    toast('This chat is not kept in this browser any more.');
    location.replace('#chat');
    return undefined;
  }
  chats.shown();
  chats.draw();
  showDraft();
  if (!narrow.matches) $('#box').focus();
  return undefined;
};

// ---- the beginning

/** Another tab has changed a chat, or deleted all (''), or was closed while it answered these turns (`left`). */
const elsewhere = async (id, left) => {
  chats.draw();
  const { current } = chat;
  if (!current?.id || (id && id !== current.id)) return;
  const found = await store.load(current.id);
  if (chat.current !== current) return;
  if (found) {
    takeOver(found);
    if (left.length) endRuns(left);
    return;
  }
  toast('This chat was deleted in another tab.');
  await openChat('');
  if (id) keepForNew();
  if (!$('#view-chat').hidden) location.hash = '#chat';
};

/** Drops what is kept and this server does not offer any more: it would refuse every question. */
const checkChoices = async (about) => {
  const { policy, press } = store.settings;
  if (press && !about.presses.slice(1).some((one) => one.name === press)) store.keep({ press: '' });
  if (!policy || about.policies.some((one) => one.name === policy)) return;
  if (!(await get(`/policy?name=${encodeURIComponent(policy)}`)).error) return;
  store.keep({ policy: '' });
  toast(`This server does not offer the policy ${policy} any more; its default is used.`);
};

let told = false;
const start = async () => {
  const about = await get('/about');
  askFor(about.user);
  const lost = await store.open(about.user, elsewhere);
  if (lost && !told) toast(`This browser keeps nothing of this page (${lost}): it is gone when you close or reload it. Export what you need.`, { bad: true, life: 60_000 });
  told = true;
  store.loadSettings();
  await checkChoices(about);
  notePolicies(about.policies);
  store.theme();
  const { model } = about;
  $('#model').textContent = `${model.name} · ${model.dtype} on ${model.device} · ${model.context_length.toLocaleString('en')} tokens of context`;
  $('#logout').hidden = !about.keyed;
  $('#logout').addEventListener('submit', async (event) => {  // what was deleted a moment ago, while there still is a login
    event.preventDefault();
    await settle();
    event.target.submit();
  });
  $('#logout button').title = `You are ${about.user}${about.role === 'admin' ? ', an administrator' : ''}`;
  $('#policy-picker').replaceWith(policyPicker(about));
  $('#retrieval-picker').replaceWith(retrievalPicker(about));
  $('#settings-open').addEventListener('click', () => openSettings(about));
  showWelcome(about);
  watchScrolling();
  startComposer();
  startLibrary();
  startUploads();
  watchFiles();
  chats.startChats();
  await Promise.all([show(about).catch(failed), refreshFiles()]);
  addEventListener('hashchange', () => show(about).catch(failed));
  onBack(refreshFiles);
  watchServer(about);
  watchConnection(about.user);
  learn();
  document.body.dataset.ready = '1';
};

const begin = async () => {
  try {
    await start();
  } catch (error) {
    if (error.status === 401) { location.href = '/ui/login'; return; }
    const notice = $('#notice'), passing = error instanceof ApiError;  // of the server, not of this browser
    notice.hidden = false;
    notice.replaceChildren(h('span', {}, `The page could not begin: ${error.message}${passing ? ' It tries again.' : ''}`));
    if (passing) setTimeout(() => { notice.hidden = true; begin(); }, 2000);
    else throw error;
  }
};
addEventListener('unhandledrejection', (event) => failed(event.reason));  // nothing that somebody asked for fails without a word
addEventListener('pageshow', (event) => { if (event.persisted) location.reload(); });  // perhaps of another user by now
begin();
