// Asking the conductor. Paths are relative: the page works below any prefix of a proxy.

const KEY = "halfmoon-key";

export class Refused extends Error {
  constructor(status, message, retryAfter) {
    super(message);
    this.status = status;
    this.retryAfter = retryAfter;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

function headers(more = {}) {
  return key.get() ? { ...more, authorization: `Bearer ${key.get()}` } : more;
}

async function checked(answer) {
  if (answer.ok) return answer;
  let message = `the conductor answers ${answer.status}`;
  try {
    message = (await answer.json()).error.message;
  } catch {
    // Not one of our errors: a proxy's, perhaps.
  }
  throw new Refused(answer.status, message, answer.headers.get("retry-after"));
}

export async function get(path) {
  const signal = AbortSignal.timeout(8000);
  return (await checked(await fetch(path, { headers: headers(), signal, cache: "no-store" }))).json();
}

export async function post(path, body) {
  const signal = AbortSignal.timeout(8000);
  const more = headers({ "content-type": "application/json" });
  return (await checked(await fetch(path, { method: "POST", headers: more, body: JSON.stringify(body), signal }))).json();
}

/** Ask for a chat and hand over each event of its stream as it comes. */
export async function* chat(body, signal) {
  const answer = await checked(
    await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify({
        ...body,
        stream: true,
        stream_options: { include_usage: true },
        return_token_ids: true,
      }),
      signal,
    }),
  );
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Refused(0, "the stream broke off");
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const said = JSON.parse(data);
      if (said.error) throw new Refused(0, said.error.message);
      yield said;
    }
  }
}
