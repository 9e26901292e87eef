// Calls the functions of the server through Gradio's HTTP interface.

const API = "gradio_api";
const LOST = "The server does not answer. Is it still running?";

async function post(address, values) {
  let response;
  try {
    response = await fetch(`${API}/${address}`, {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ data: values }),
    });
  } catch {
    throw new Error(LOST);
  }
  const said = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(said.error ?? said.detail ?? `The server answered ${response.status}.`);
  return said;
}

// Calls a function that answers at once.
export async function call(name, ...values) {
  return (await post(`run/${name}`, values)).data[0];
}

// Calls a function that waits for its turn. `show` gets every state, and the last one is returned. The server ends the function when
// this connection closes, as it does with its tab.
export async function stream(name, values, show = () => {}) {
  const { event_id: id } = await post(`call/${name}`, values);
  return new Promise((resolve, reject) => {
    const source = new EventSource(`${API}/call/${name}/${id}`);
    let last = null;
    const receive = (event) => {
      const [state] = JSON.parse(event.data) ?? [];
      if (state != null) show((last = state));
    };
    source.addEventListener("generating", receive);
    source.addEventListener("complete", (event) => {
      source.close();
      // A function that has streamed ends without a new state.
      if (last === null) receive(event);
      resolve(last);
    });
    source.addEventListener("error", (event) => {
      source.close();
      const said = event.data ? JSON.parse(event.data) : null;
      reject(new Error(event.data ? (said?.error ?? said ?? "The server could not answer.") : LOST));
    });
  });
}
