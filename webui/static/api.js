// Requests to the server. The proxy adds the visitor's key; the page never has it.

export class ApiError extends Error {
  constructor(code, message, status = 0) {
    super(message);
    this.code = code;
    this.status = status;
  }
}

let who = {};
/** Says for which user this page asks. The server then refuses to ask the API in the name of somebody else, who may have
 * logged in in another tab. */
export const askFor = (user) => { who = { 'x-mpic-user': encodeURIComponent(user) }; };

const watchers = [];
/** Tells what happens to requests: `lost` (no connection), `ok`, `out` (logged out). */
export const watch = (watcher) => watchers.push(watcher);
const tell = (what) => { for (const watcher of watchers) watcher(what); };

const read = async (response) => {
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const { code = 'unknown', message = `the server answered ${response.status}` } = body.error || {};
  if (response.status === 401) tell('out');
  throw new ApiError(code, message, response.status);
};

/** Sends one request and returns the response. Raises ApiError. */
export const send = async (path, { method = 'GET', json, body, signal, keepalive } = {}) => {
  let response;
  try {
    response = await fetch(`/ui${path}`, {
      method, signal, keepalive, cache: 'no-store', redirect: 'error',
      headers: json === undefined ? who : { ...who, 'content-type': 'application/json' },
      body: json === undefined ? body : JSON.stringify(json),
    });
  } catch (error) {
    if (error.name === 'AbortError' || error.name === 'TimeoutError') throw error;
    tell('lost');
    throw new ApiError('unreachable', 'The server cannot be reached.');
  }
  tell('ok');
  return read(response);
};

let turn = Promise.resolve();
const PAUSES = [250, 500, 1000], PATIENCE = 30_000;
const once = async (path) => {
  try {
    return await (await send(path, { signal: AbortSignal.timeout(PATIENCE) })).json();
  } catch (error) {
    if (error.name === 'TimeoutError') throw new ApiError('no_answer', 'The server did not answer in time.');
    throw error;
  }
};
/** Reads JSON. One request after the other, because a key may allow only one at a time; one that gets no answer gives
 * way to the next after a while. */
export const get = (path) => {
  const attempt = async () => {
    for (const pause of PAUSES) {
      try {
        return await once(path);
      } catch (error) {
        if (error.code !== 'too_many_concurrent') throw error;
        await new Promise((done) => { setTimeout(done, pause); });
      }
    }
    return once(path);
  };
  const result = turn.then(attempt);
  turn = result.catch(() => {});
  return result;
};

export const call = async (method, path, json, options = {}) => (await send(path, { method, json, ...options })).json();

/** Uploads a form; `progress` gets the share that was sent. */
export const upload = (path, fields, progress = () => {}) => new Promise((resolve, reject) => {
  const form = new FormData(), request = new XMLHttpRequest();
  for (const [name, value] of Object.entries(fields)) form.append(name, value, ...(value instanceof File ? [value.name] : []));
  request.upload.onprogress = (event) => progress(event.total ? event.loaded / event.total : 0);
  request.onerror = () => { tell('lost'); reject(new ApiError('unreachable', 'The server cannot be reached.')); };
  request.onload = () => {
    let body = {};
    try { body = JSON.parse(request.responseText); } catch { /* told below */ }
    if (request.status === 200) return resolve(body);
    if (request.status === 401) tell('out');
    const { code = 'unknown', message = `the server answered ${request.status}` } = body.error || {};
    return reject(new ApiError(code, message, request.status));
  };
  request.open('POST', `/ui${path}`);
  for (const [name, value] of Object.entries(who)) request.setRequestHeader(name, value);
  request.send(form);
});

/** Yields the events of an answer as it is written. Raises ApiError, also when the stream ends too early. */
export async function* stream(body, signal) {
  const response = await send('/v1/chat/completions', { method: 'POST', json: body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      tell('lost');
      throw new ApiError('unreachable', 'The connection was lost while the answer was being written.');
    }
    if (piece.done) break;
    const events = (rest + piece.value).split('\n\n');
    rest = events.pop();
    for (const event of events) {
      const data = event.split('\n').filter((line) => line.startsWith('data:')).map((line) => line.slice(5).trimStart()).join('\n');
      if (data === '[DONE]') return;
      if (!data) continue;
      const value = JSON.parse(data);
      if (value.error) throw new ApiError(value.error.code, value.error.message);
      yield value;
    }
  }
  tell('lost');
  throw new ApiError('unreachable', 'The connection was lost while the answer was being written.');
}
