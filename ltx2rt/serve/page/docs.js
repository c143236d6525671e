// What openapi.json says, as tables.

const root = new URL(".", location.href).href;
document.querySelector("#example").textContent =
  `curl ${root}v1/videos -H "Authorization: Bearer TOKEN" -F prompt="a red fox in the snow" -F seconds=5\n` +
  `curl ${root}v1/videos/ID          # "status": "completed"?\n` +
  `curl -o fox.mp4 ${root}v1/videos/ID/content`;

function row(to, ...cells) {
  to.append(Object.assign(document.createElement("tr"), {}));
  for (const text of cells) to.lastChild.append(Object.assign(document.createElement("td"), { textContent: text }));
}

const answer = await fetch("openapi.json");
if (answer.ok) {
  const { paths } = await answer.json();
  for (const [path, methods] of Object.entries(paths)) {
    row(document.querySelector("#routes"), Object.keys(methods).join(", ").toUpperCase(), path,
      Object.values(methods).map((one) => one.summary ?? "").join(" "));
  }
  const { properties } = paths["/v1/videos"].post.requestBody.content["application/json"].schema;
  for (const [name, about] of Object.entries(properties)) {
    const bounds = [about.enum?.join(", "), about.minimum !== undefined && `from ${about.minimum}`,
      about.maximum !== undefined && `to ${about.maximum}`, about.default !== undefined && `default ${about.default}`];
    row(document.querySelector("#fields"), name, about.type, about.description ?? "", bounds.filter(Boolean).join(", "));
  }
} else {
  document.querySelector("#problem").textContent = "Sign in on the page first: this server asks for a token.";
}
