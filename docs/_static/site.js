// What scrolls sideways can be reached and scrolled with the keyboard.
function reachable() {
  for (const element of document.querySelectorAll("article pre, article .table-wrapper, .content")) {
    if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
    else element.removeAttribute("tabindex");
  }
}
addEventListener("DOMContentLoaded", reachable);
addEventListener("load", reachable);
addEventListener("resize", reachable);
