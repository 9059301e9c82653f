// In MLflow's viewer the page is in a sandboxed frame, where a link to a part of the page would load a page:
// there it scrolls. Elsewhere the browser does.
if (window !== window.top) document.addEventListener("click", event => {
  const link = event.target.closest('a[href^="#"]');
  const part = link && document.getElementById(link.getAttribute("href").slice(1));
  if (!part) return;
  event.preventDefault();
  for (let one = part; one; one = one.parentElement) if (one.tagName === "DETAILS") one.open = true;
  part.scrollIntoView();
  part.tabIndex = -1;
  part.focus({preventScroll: true});
});
