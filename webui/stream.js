// One stream of results that never ends. Gradio's server closes its stream when no event is left and the client opens
// another with the next one; an event that begins in between would never get its results. So the client gets a stream
// of ours, which asks the server again whenever an event waits. It must run before Gradio's own scripts.
(() => {
  const ask = window.fetch, waiting = new Set();
  const addressOf = (request) => (request instanceof Request ? request.url : String(request));
  let stream = null;

  class Results {
    constructor(request) {
      this.request = request;
      this.reading = false;
      this.body = new ReadableStream({ start: (controller) => { this.controller = controller; } });
    }

    async read() {
      if (this.reading) return;
      this.reading = true;
      try {
        while (waiting.size) {
          const response = await ask(this.request.clone());
          if (!response.ok) throw new TypeError(`the results cannot be read: ${response.status}`);
          if (!await this.pass(response)) throw new TypeError('the results have ended before their events');
        }
      } catch (error) {
        waiting.clear();
        this.controller.error(error);
        if (stream === this) stream = null;
        if (error.name !== 'AbortError') dispatchEvent(new CustomEvent('mpic-lost'));
      }
      this.reading = false;
    }

    /** Forwards the messages of a response, and returns whether one was about an event. */
    async pass(response) {
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader(), encoder = new TextEncoder();
      let rest = '', any = false;
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return any;
        const messages = (rest + value).split('\n\n');
        rest = messages.pop();
        for (const message of messages) {
          const { msg, event_id: event } = JSON.parse(message.slice('data: '.length));
          if (msg === 'close_stream') continue;
          any ||= Boolean(event);
          if (msg === 'process_completed') waiting.delete(event);
          if (msg === 'unexpected_error') throw new TypeError('network error');  // it was cut off: the server is ending
          this.controller.enqueue(encoder.encode(`${message}\n\n`));
        }
      }
    }
  }

  window.fetch = async (request, options) => {
    const path = addressOf(request);
    if (path.includes('/queue/data?')) {
      stream = new Results(new Request(request, options));
      stream.read();
      return new Response(stream.body, { headers: { 'content-type': 'text/event-stream' } });
    }
    const response = await ask(request, options);
    if (path.includes('/queue/join') && response.ok) {
      waiting.add((await response.clone().json()).event_id);
      stream?.read();
    }
    return response;
  };
})();
