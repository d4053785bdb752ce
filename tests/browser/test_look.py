import pytest, time, threading, json, urllib.request
pytestmark = pytest.mark.slow
def post(url, body):
    req = urllib.request.Request(url, json.dumps(body).encode(), {"content-type":"application/json"})
    return urllib.request.urlopen(req, timeout=60).read()
def test_look(browser, server):
    b = browser
    b.open(server.url)
    b.one("textarea").send_keys("Tell me about a lion.\n")
    b.until(lambda: b.run("return document.querySelector('.log').ariaBusy=='false' && document.querySelectorAll('.msg').length==2"), "answer")
    b.labelled("Token prob").click()
    b.one("textarea").send_keys("And about a mouse?\n")
    b.until(lambda: b.run("return document.querySelector('.log').ariaBusy=='false' && document.querySelectorAll('.msg').length==4"), "answer")
    b.shot("chat")
    toks = b.all(".msg .tok")
    print(len(toks))
    if toks: b.hover(toks[3])
    time.sleep(.3); b.shot("chat-hover")
    b.open(server.url+"/#completion")
    b.one("textarea").send_keys("Once upon a time there was")
    b.button("Continue").click()
    b.until(lambda: b.run("return document.querySelector('#view-completion .tokens').ariaBusy=='false'"), "c")
    time.sleep(.5)
    t=b.all("#view-completion .tokens .tok")
    b.hover(t[5]); time.sleep(1); b.shot("completion")
    b.open(server.url+"/#engine")
    ts=[threading.Thread(target=post,args=(server.url+"/v1/completions",{"model":"demo","prompt":"A long time ago there lived a lion in the deep forest. "*6+str(i),"max_tokens":300,"ignore_eos":True})) for i in range(6)]
    for x in ts: x.start()
    time.sleep(1.0); b.shot("engine1")
    for x in ts: x.join()
    time.sleep(1.2); 
    for d in b.all("details.twin summary"): d.click()
    time.sleep(1.2); b.shot("engine2")
