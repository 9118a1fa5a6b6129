import sim2
from sim2 import *
P=progs()
def add(n,start_after,end,T):
    l=load(n+'.sass','ILi128'); i0=[x[0] for x in l if x[0]>start_after][0]
    P[n]=prep(path(l,i0,end,T),T)
import re
def auto(n):
    l=load(n+'.sass','ILi128')
    ks=[k for k,x in enumerate(l) if 0x4c00<x[0]<0x7000 and re.match(r'@?!?P?\d? ?BRA|@!?P\d BRA|BRA',x[1])]
    T={};start=None;end=None
    for k in ks:
        x=l[k]
        if x[1].startswith('BRA') and start is None: start=x[0]; continue
        if start is None: continue
        if 'P2, 0x' in x[1] : end=x[0]; break
        if x[1].startswith('@P1 BRA') and x[0]-start<0x600: T[x[0]]=True
        elif x[1].startswith('@P0 BRA'): T[x[0]]=False
    add(n,start,end,T)
for n in ('woven','lean_t','apart','apart_w'):
    try: auto(n)
    except Exception as e: print(n,repr(e))
for mu,sh,sy,brk in ((24,26,22,12),(40,33,40,25),(60,33,60,40)):
  sim2.LAT.update(MUFU=mu,SHFL=sh,SYNCS=sy,LDS=33)
  for Q in (2,64):
    r={}
    for n in P:
        d=2 if n=='fa3' else 1
        r[n]=[round(simulate(P[n],nw=1,Q=Q,brk=brk,iters=16)/d)]+[round(simulate(P[n],nw=2,Q=Q,lag=g,brk=brk,iters=16)/d) for g in (0,400)]
    print('mufu',mu,'branch',brk,'queue',Q,r,flush=True)
