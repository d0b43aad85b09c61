// Short texts in localStorage. What the browser does not keep (no room, or storage is switched off) is held in this
// page's memory, so that it lasts at least as long as the page.

const held = new Map();

export const get = (key) => {
  if (held.has(key)) return held.get(key);
  try { return localStorage.getItem(key); } catch { return null; }
};

/** Returns whether the browser keeps the text. */
export const put = (key, text) => {
  try {
    localStorage.setItem(key, text);
    held.delete(key);
    return true;
  } catch {
    held.set(key, text);
    return false;
  }
};

export const remove = (key) => {
  held.delete(key);
  try { localStorage.removeItem(key); } catch { /* it keeps nothing */ }
};

/** Returns whether the browser lets this page keep texts at all. */
export const works = () => {
  const key = 'mpic-try', kept = put(key, '1');
  remove(key);
  return kept;
};
