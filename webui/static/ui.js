// Notices that can be undone, menus, dialogs.
import { $, button, h, iconButton } from './dom.js';

export const UNDO_MS = 10_000;

/** Says something to screen readers. */
export const announce = (text) => {
  const place = $('#announcer');
  place.textContent = '';
  setTimeout(() => { place.textContent = text; }, 50);
};

const pending = new Set();

/** Shows a notice for ten seconds, longer while it is used. `action` is a button of it: [label, function]. */
export const toast = (text, { action, bad = false, ended = () => {}, life = UNDO_MS } = {}) => {
  let timer = 0, left = life, since = 0, done = false;
  const close = (used) => {
    if (done) return undefined;
    done = true;  // first: some browsers send a focusout when what has the focus is removed, which would start the time again
    clearTimeout(timer);
    pending.delete(close);
    made.remove();
    return used ? undefined : ended();
  };
  const run = () => { if (done) return; since = Date.now(); timer = setTimeout(close, left, false); };
  const hold = () => { clearTimeout(timer); left = Math.max(2000, left - (Date.now() - since)); };
  const made = h('div', { class: `toast${bad ? ' bad' : ''}`, role: bad ? 'alert' : 'status', onfocusin: hold, onfocusout: run },
    h('span', {}, text),
    action && button(action[0], () => { close(true); action[1](); }, { class: 'button small' }),
    iconButton('close', 'Dismiss', () => close(false)));
  $('#toasts').append(made);
  run();
  if (action) pending.add(close);
  return close;
};

/** Does something that can be taken back for ten seconds. `show` shows it as done at once, `undo` takes that back, and
 * `commit` does it for good; if the page is left before, it is done then. */
export const undoable = (text, { show, undo, commit = () => {} }) => {
  show();
  toast(text, { action: ['Undo', undo], ended: commit });
};
/** Does for good what can still be taken back, and waits for it. */
export const settle = () => Promise.all([...pending].map((close) => close(false)));
addEventListener('pagehide', settle);

export const failed = (error) => toast(`${error.message} [${error.code || 'page_error'}]`, { bad: true });

/** Places a menu below its button, or above it where there is more room; lists that scroll do not cut it off. */
const placeAt = (panel, at) => {
  const own = panel.getBoundingClientRect(), below = at.bottom + 4;
  const top = below + own.height > innerHeight - 8 ? Math.max(8, at.top - own.height - 4) : below;
  const left = Math.max(8, Math.min(at.left, innerWidth - own.width - 8));
  panel.style.setProperty('top', `${top}px`);
  panel.style.setProperty('left', `${left}px`);
};

/** A button with a panel that it opens. Escape, a click elsewhere, and leaving it by Tab close it. */
export const disclosure = (opener, panel, { onopen = () => {} } = {}) => {
  const root = h('div', { class: 'pop' }, opener, panel);
  panel.hidden = true;
  panel.classList.add('pop-panel');
  opener.setAttribute('aria-expanded', 'false');
  const outside = (event) => { if (!root.contains(event.target)) close(false); };
  const close = (refocus = true) => {
    if (panel.hidden) return;
    panel.hidden = true;
    opener.setAttribute('aria-expanded', 'false');
    document.removeEventListener('pointerdown', outside, true);
    if (refocus) opener.focus();
  };
  const open = () => {
    panel.hidden = false;
    opener.setAttribute('aria-expanded', 'true');
    document.addEventListener('pointerdown', outside, true);
    onopen();
    if (panel.classList.contains('menu')) placeAt(panel, opener.getBoundingClientRect());
  };
  opener.addEventListener('click', () => (panel.hidden ? open() : close()));
  root.addEventListener('keydown', (event) => {
    if (event.key === 'Escape' && !panel.hidden) { event.preventDefault(); event.stopPropagation(); close(); }
  });
  root.addEventListener('focusout', (event) => {
    if (event.relatedTarget && !root.contains(event.relatedTarget)) close(false);
  });
  return { root, open, close };
};

/** A menu of actions: [label, function, options] each; made when it is opened. */
export const menu = (label, actions, props = {}) => {
  const opener = iconButton('more', label, null, { 'aria-haspopup': 'true', ...props });
  const panel = h('div', { class: 'menu' });
  const made = disclosure(opener, panel, {
    onopen: () => {
      panel.replaceChildren(...actions().filter(Boolean).map(([text, act, options = {}]) =>
        h('button', { type: 'button', class: `menu-item${options.bad ? ' bad' : ''}`, onclick: () => { made.close(); act(); }, ...options.props }, text)));
      panel.firstChild?.focus();
    },
  });
  panel.addEventListener('keydown', (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const items = [...panel.children];
    items[(items.indexOf(document.activeElement) + step + items.length) % items.length].focus();
  });
  return made.root;
};

/** Opens a dialog and returns it; it is removed when it closes, and the focus goes back. */
export const dialog = (title, content, { wide = false } = {}) => {
  const before = document.activeElement;
  const made = h('dialog', { class: `dialog${wide ? ' wide' : ''}`, 'aria-labelledby': 'dialog-title' },
    h('div', { class: 'dialog-head' }, h('h2', { id: 'dialog-title' }, title), iconButton('close', 'Close', () => made.close())),
    h('div', { class: 'dialog-body' }, content));
  made.addEventListener('click', (event) => { if (event.target === made) made.close(); });
  made.addEventListener('close', () => {
    made.remove();
    if (before?.isConnected) before.focus();
  });
  document.body.append(made);
  made.showModal();
  return made;
};

/** Asks before something that cannot be undone. */
export const confirm = (title, text, verb) => new Promise((resolve) => {
  let answer = false;
  const made = dialog(title, [h('p', {}, text), h('div', { class: 'row end' },
    button('Cancel', () => made.close(), { autofocus: true }),
    button(verb, () => { answer = true; made.close(); }, { class: 'button danger' }))]);
  made.addEventListener('close', () => resolve(answer));
});

/** Asks for one line of text; null if it is cancelled. `check` returns what is wrong with it. */
export const prompt = (title, label, value, check = () => '') => new Promise((resolve) => {
  let answer = null;
  const input = h('input', { type: 'text', id: 'prompt-input', value, autocomplete: 'off', maxlength: 200, 'aria-describedby': 'prompt-error' });
  const error = h('p', { class: 'field-error', id: 'prompt-error', role: 'alert' });
  const made = dialog(title, h('form', {
    onsubmit: (event) => {
      event.preventDefault();
      error.textContent = check(input.value.trim());
      if (error.textContent) return;
      answer = input.value.trim();
      made.close();
    },
  }, h('label', { for: 'prompt-input' }, label), input, error,
  h('div', { class: 'row end' }, button('Cancel', () => made.close()), h('button', { class: 'button primary' }, 'Save'))));
  input.select();
  made.addEventListener('close', () => resolve(answer));
});

/** Gives a file to the browser's downloads. */
export const download = (name, data, type) => {
  const url = URL.createObjectURL(data instanceof Blob ? data : new Blob([data], { type }));
  h('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
};

export const copy = async (text) => {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // no permission, or not a secure page
    const area = h('textarea', { class: 'unseen', value: text });
    document.body.append(area);
    area.select();
    document.execCommand('copy');
    area.remove();
  }
  announce('Copied');
};
