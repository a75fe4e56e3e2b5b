// Differences: signs are drawn, not text, so that what one copies is the program after the change.
document.addEventListener("DOMContentLoaded", () => {
  for (const code of document.querySelectorAll("pre > code")) {
    if (!code.querySelector(".gd, .gi")) continue;
    const lines = code.textContent.replace(/\n$/, "").split("\n");
    code.replaceChildren(
      ...lines.map((line) => {
        const span = document.createElement("span");
        span.className = `fp8-line ${{ "-": "gd", "+": "gi" }[line[0]] ?? ""}`;
        span.dataset.sign = line[0] ?? " ";
        span.textContent = line.slice(1) + "\n";
        return span;
      }),
    );
  }
});
