// The turns of a chat as data. Each has an `id`, the time at which it was asked (`at`, their order) and the time of its
// last change (`changed`). A chat remembers when turns were deleted (`removed`). So a turn that comes back finds its
// place, and what two tabs keep of one chat can be put together.

const newId = () => crypto.randomUUID?.() || `${Date.now()}-${Math.random().toString(36).slice(2)}`;
const inOrder = (turns) => turns.sort((a, b) => a.at - b.at || (a.id < b.id ? -1 : 1));

export const newTurn = (turns, fields) => {
  const at = Math.max(Date.now(), (turns.at(-1)?.at ?? 0) + 1);
  return { id: newId(), at, changed: at, again: null, ...fields };
};

/** Notes that a turn has changed. */
export const touch = (turn) => { turn.changed = Math.max(Date.now(), turn.changed + 1); };

export const turnOf = (chat, id) => chat.turns.find((turn) => turn.id === id);

/** Takes turns out of a chat. */
export const takeOut = (chat, turns) => {
  for (const turn of turns) chat.removed = { ...chat.removed, [turn.id]: Math.max(Date.now(), turn.changed) };
  chat.turns = chat.turns.filter((turn) => !turns.some((one) => one.id === turn.id));
};

/** Puts turns back where they stood, in place of what became of them. */
export const putBack = (chat, turns) => {
  for (const turn of turns) {
    const now = turnOf(chat, turn.id);
    turn.changed = Math.max(turn.changed, now?.changed ?? 0, chat.removed?.[turn.id] ?? 0);
    touch(turn);
  }
  chat.turns = inOrder([...chat.turns.filter((turn) => !turns.some((one) => one.id === turn.id)), ...turns]);
};

/** Brings into a chat what another tab has kept of it: of each turn the later version. Returns whether that changed it. */
export const merge = (chat, kept) => {
  const removed = { ...kept.removed };
  for (const [id, when] of Object.entries(chat.removed || {})) removed[id] = Math.max(when, removed[id] ?? 0);
  const latest = new Map(chat.turns.map((turn) => [turn.id, turn]));
  for (const turn of kept.turns) if (!latest.has(turn.id) || latest.get(turn.id).changed < turn.changed) latest.set(turn.id, turn);
  const turns = inOrder([...latest.values()].filter((turn) => !(removed[turn.id] >= turn.changed)));
  const news = turns.length !== chat.turns.length || turns.some((turn, i) => turn !== chat.turns[i]);
  Object.assign(chat, { turns, removed });
  return news;
};

/** Gives the turns that an earlier version of the page has kept what they lack. */
export const complete = (chat) => {
  chat.turns.forEach((turn, i) => {
    turn.id ||= `${chat.id}/${i}`;
    turn.at ??= i;
    turn.changed ??= 0;
  });
  return chat;
};
