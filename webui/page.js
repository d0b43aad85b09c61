// Adds to Gradio's page: buttons in HTML send events, handles are completed while the user types, files may be dropped
// anywhere, a lost login or server is reported, and colours, drafts and open details are remembered.
() => {
  const HANDLE = /(?<![A-Za-z0-9_])(IMAGE|FILE)#([A-Za-z0-9_.-]*)$/i;
  const root = new URL('.', document.baseURI).pathname;
  const area = () => document.querySelector('#box textarea');
  const put = (text) => { area().value = text; area().dispatchEvent(new Event('input', { bubbles: true })); };
  let user = '';
  addEventListener('mpic-user', (event) => {
    user = event.detail;
    const draft = localStorage.getItem(`mpic-draft:${user}`);
    if (draft && area() && !area().value) put(draft);
    const side = document.querySelector('.sidebar.open .toggle-button');
    if (side && matchMedia('(max-width: 768px)').matches) side.click();  // it would cover the chat
    document.body.dataset.ready = user;
  });

  // ---- buttons in HTML
  const insert = (text) => {
    const box = area(), at = box.selectionStart ?? box.value.length, before = box.value.slice(0, at);
    put(`${before}${before && !/\s$/.test(before) ? ' ' : ''}${text} ${box.value.slice(at)}`);
    box.focus();
  };
  document.addEventListener('click', (event) => {
    const pressed = event.target.closest?.('[data-to]');
    if (!pressed) return;
    const { to, confirm: question, ...detail } = pressed.dataset;
    if (question && !confirm(question)) return;
    if (to === 'box') { document.querySelector('[role=tab]')?.click(); setTimeout(() => insert(detail.text), 50); return; }
    document.dispatchEvent(new CustomEvent(`mpic-${to}`, { detail }));
  });

  // ---- handles
  const menu = Object.assign(document.createElement('ul'), { id: 'mpic-handles', hidden: true });
  menu.setAttribute('role', 'listbox');
  menu.setAttribute('aria-label', 'handles');
  document.body.append(menu);
  let chosen = 0;
  const known = () => [...document.querySelectorAll('#library [data-handle]')].map((item) => item.dataset.handle).filter(Boolean);
  const typed = () => { const box = area(); return box && box.value.slice(0, box.selectionStart).match(HANDLE); };
  const close = () => { menu.hidden = true; area()?.setAttribute('aria-expanded', 'false'); area()?.removeAttribute('aria-activedescendant'); };
  const mark = () => {
    [...menu.children].forEach((item, i) => item.setAttribute('aria-selected', String(i === chosen)));
    menu.children[chosen].scrollIntoView({ block: 'nearest' });
    area().setAttribute('aria-activedescendant', menu.children[chosen].id);
  };
  const take = () => {
    const box = area(), match = typed(), rest = box.value.slice(box.selectionStart);
    const before = box.value.slice(0, box.selectionStart - match[0].length), name = menu.children[chosen].textContent;
    put(`${before}${name} ${rest.replace(/^ /, '')}`);
    box.setSelectionRange(before.length + name.length + 1, before.length + name.length + 1);
    box.focus();
    close();
  };
  const complete = () => {
    const match = typed();
    const found = match ? known().filter((name) => name.startsWith(`${match[1].toUpperCase()}#`) && name.toUpperCase().includes(match[2].toUpperCase())) : [];
    if (!found.length || (found.length === 1 && found[0] === match[0])) return close();
    menu.replaceChildren(...found.slice(0, 50).map((name, i) => Object.assign(document.createElement('li'), { id: `mpic-handle-${i}`, role: 'option', textContent: name })));
    for (const item of menu.children) item.setAttribute('role', 'option');
    const place = area().getBoundingClientRect();
    Object.assign(menu.style, { left: `${place.left}px`, bottom: `${innerHeight - place.top + 4}px`, maxWidth: `${place.width}px` });
    menu.hidden = false;
    area().setAttribute('aria-expanded', 'true');
    chosen = 0;
    mark();
  };
  menu.addEventListener('pointerdown', (event) => event.preventDefault());  // the box keeps the focus
  menu.addEventListener('click', (event) => { chosen = [...menu.children].indexOf(event.target); if (chosen >= 0) take(); });
  document.addEventListener('input', (event) => {
    if (event.target !== area()) return;
    Object.entries({ role: 'combobox', 'aria-autocomplete': 'list', 'aria-controls': menu.id, 'aria-label': 'Your question' })
      .forEach(([name, value]) => area().setAttribute(name, value));
    if (user) localStorage.setItem(`mpic-draft:${user}`, area().value);
    complete();
  });
  document.addEventListener('keydown', (event) => {
    if (menu.hidden || event.target !== area() || event.isComposing) return;
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step) { chosen = (chosen + step + menu.children.length) % menu.children.length; mark(); }
    else if (event.key === 'Enter' || event.key === 'Tab') take();
    else if (event.key === 'Escape') close();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }, true);
  document.addEventListener('focusout', (event) => { if (event.target === area()) close(); });

  // ---- files dropped outside the box
  const hasFiles = (event) => [...(event.dataTransfer?.types || [])].includes('Files');
  document.addEventListener('dragover', (event) => { if (hasFiles(event)) event.preventDefault(); });
  document.addEventListener('drop', (event) => {
    const input = document.querySelector('#box input[type=file]');
    if (!hasFiles(event) || event.defaultPrevented || !input || event.target.closest?.('input[type=file]')) return;
    event.preventDefault();
    input.files = event.dataTransfer.files;
    input.dispatchEvent(new Event('change', { bubbles: true }));
  });

  // ---- an expired login, an unreachable server
  const notice = Object.assign(document.createElement('div'), { id: 'mpic-notice', hidden: true });
  notice.setAttribute('role', 'alert');
  document.body.prepend(notice);
  const tell = (text, link) => {
    if (!notice.hidden && notice.textContent.startsWith(text)) return;
    notice.replaceChildren(text, ...(link ? [' ', Object.assign(document.createElement('a'), { href: `${root}login`, textContent: link })] : []));
    notice.hidden = false;
  };
  const ask = window.fetch;
  let waiting = 0, away = false;
  const look = async () => {
    clearTimeout(waiting);
    try {
      const response = await ask(`${root}alive`, { cache: 'no-store' });
      if (response.status === 401) return tell('Your login has ended. Chats and drafts are kept.', 'Log in again');
      if (!response.ok) throw new TypeError(`${response.status}`);
      const { user: now } = await response.json();
      // the server has forgotten this page, or another user has logged in from this browser
      if (away || (user && now !== user)) return location.reload();
      notice.hidden = true;
    } catch {
      away = true;
      tell('The server does not answer. This page tries again; what you have written is kept.');
      waiting = setTimeout(look, 2000);
    }
  };
  window.fetch = async (...given) => {
    try {
      const response = await ask(...given);
      if (response.status === 401) look();
      return response;
    } catch (error) { if (error.name !== 'AbortError') look(); throw error; }
  };
  addEventListener('mpic-lost', look);
  addEventListener('online', look);
  document.addEventListener('visibilitychange', () => { if (!document.hidden) look(); });

  // ---- colours, and whether figures are open
  const paint = () => document.body.classList.toggle('dark', localStorage.getItem('mpic-dark') === 'yes'
    || (localStorage.getItem('mpic-dark') !== 'no' && matchMedia('(prefers-color-scheme: dark)').matches));
  document.addEventListener('mpic-colours', () => { localStorage.setItem('mpic-dark', document.body.classList.contains('dark') ? 'no' : 'yes'); paint(); });
  if (localStorage.getItem('mpic-dark')) paint();
  document.addEventListener('toggle', (event) => {
    if (event.target.matches?.('.mpic-facts')) localStorage.setItem('mpic-details', event.target.open ? 'yes' : 'no');
  }, true);
  new MutationObserver(() => {
    const last = [...document.querySelectorAll('.mpic-facts')].at(-1);
    if (!last || last.dataset.seen) return;
    last.dataset.seen = 'yes';
    if (localStorage.getItem('mpic-details') === 'yes') last.open = true;
  }).observe(document.body, { childList: true, subtree: true });
}
