// Colours of the style sheet for a canvas, in the scheme of the page.

/** What `var(name)` is inside an element, in high contrast too: there is no other colour to tell two users by. */
export function colourOf(place, name) {
  const probe = place.appendChild(document.createElement("i"));
  probe.style.setProperty("forced-color-adjust", "none");
  probe.style.color = `var(${name})`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}
