// Colours of the style sheet for a canvas, in the scheme of the page.

/** What `var(name)` is inside an element. */
export function colourOf(place, name) {
  const probe = place.appendChild(document.createElement("i"));
  probe.style.color = `var(${name})`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
