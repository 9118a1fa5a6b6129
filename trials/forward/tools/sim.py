import re,sys,collections
from dec import load
def path(ins, start_addr, end_addr, takes):
    """walk from start to end (exclusive, second time); takes: dict addr-> bool"""
    idx={x[0]:k for k,x in enumerate(ins)}
    k=idx[start_addr]; out=[]
    while True:
        x=ins[k]; out.append(x)
        m=re.search(r'BRA(?:\.\S+)? (?:P\d, )?(?:UR\d+, )?0x([0-9a-f]+)',x[1])
        t=False
        if m:
            cond=x[1].startswith('@')
            t=takes.get(x[0], not cond)
        if x[0]==end_addr: break
        k=idx[int(m.group(1),16)] if m and t else k+1
    return out
def op(t):
    m=re.match(r'(@!?U?P\w+\s+)?([A-Z0-9_.]+)',t); return m.group(2)
LAT=dict(MUFU=22,SHFL=25,LDS=30,S2R=30,SYNCS=25,BAR=20,STS=20)
def run(p, reps=2, mufu_int=8, verbose=False, lat=LAT):
    t=0; sb=[0]*6; mufu=0; alu=0
    marks=[]; endt=[]
    for r in range(reps):
        for x in p:
            a,txt,s,y,wr,rd,wait,_=x
            o=op(txt); b=o.split('.')[0]
            for i in range(6):
                if wait>>i&1: t=max(t,sb[i])
            if b=='MUFU': t=max(t,mufu); mufu=t+mufu_int
            if b in('FMNMX','IADD3','F2FP','LOP3','SHF','ISETP','PRMT','LEA','FSEL','PLOP3','I2FP','VIADD','SEL'):
                t=max(t,alu); alu=t+2
            L=lat.get(b,10)
            if wr!=7: sb[wr]=max(sb[wr],t+L)
            if rd!=7: sb[rd]=max(sb[rd],t+min(L,12))
            if b in('HGMMA','WARPGROUP','BRA','BAR','SYNCS'): marks.append((r,t,hex(a),txt[:60]))
            t+=max(s,1)
            if b=='BRA' and verbose: pass
        endt.append(t)
    return endt,marks
def count(p):
    c=collections.Counter()
    for x in p: 
        o=op(x[1]); b=o.split('.')[0]
        if b=='HGMMA': b='HGMMA '+o.split('.')[1]+(' RS' if re.search(r'HGMMA\S* R\d+, R\d+,',x[1]) else ' SS')
        elif b in('WARPGROUP','SYNCS'): b='.'.join(o.split('.')[:2])
        c[b]+=1
    return c
