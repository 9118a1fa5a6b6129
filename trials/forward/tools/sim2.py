import re,sys
from sim import path,op
from dec import load
ALU={'FMNMX','IADD3','F2FP','LOP3','SHF','ISETP','PRMT','LEA','FSEL','PLOP3','I2FP','VIADD','SEL','VIMNMX'}
def prep(p,takes):
    out=[]
    for x in p:
        a,t,s,y,wr,rd,wait,_=x; o=op(t); b=o.split('.')[0]; d={}
        if b=='HGMMA':
            n=int(re.search(r'64x(\d+)x16',t).group(1)); d=dict(k='H',n=n,commit='gsb0' in t,rs=bool(re.search(r'HGMMA\S* R\d+, R\d+,',t)))
        elif o.startswith('WARPGROUP.DEPBAR'): d=dict(k='W',n=int(t.split('0x')[1][0],16))
        elif o.startswith('BAR.SYNC'): d=dict(k='S')
        elif o.startswith('BAR.ARV'): d=dict(k='A')
        elif b=='BRA': d=dict(k='B',taken=takes.get(a, not t.startswith('@')))
        else: d=dict(k=b)
        d.update(s=max(s,1),wr=wr,rd=rd,wait=wait); out.append(d)
    return out
LAT=dict(MUFU=24,SHFL=26,LDS=30,S2R=30,SYNCS=22,I2F=20)
def simulate(prog,iters=24,nw=2,Q=2,share='fifo',tlat=40,lag=0,brk=12,rsblock=False,verbose=False,fetch=0,perw=True):
    # one warp of each group on one scheduler; tensor core serves HGMMAs in order of issue
    W=[dict(pc=0,t=lag*w,sb=[0]*6,it=0,chain=0,groups=[],starts=[],last=0) for w in range(nw)]
    turn=[1]+[0]*(nw-1)  # arrivals available
    tens=0; q=[]  # completion times of queued HGMMAs (start,end,w)
    mufu=0; alu=0; now=0; rr=0
    while any(w['it']<iters for w in W):
        issued=False
        for k in range(nw):
            wi=(rr+k)%nw; w=W[wi]
            if w['it']>=iters or w['t']>now: continue
            x=prog[w['pc']]
            if any((x['wait']>>i&1) and w['sb'][i]>now for i in range(6)): continue
            kd=x['k']
            if kd=='H':
                if (sum(1 for e in q if e[1]>now and (not perw or e[2]==wi))>=Q): continue
                dur=x['n']//2
                st=max(tens,now+4); en=st+dur; tens=en; q=[e for e in q if e[1]>now]+[(st,en,wi)]
                w['last']=en
                if x['commit']: w['groups'].append(en+tlat)
            elif kd=='W':
                pend=[g for g in w['groups'] if g>now]
                if len(pend)>x['n']: continue
                w['groups']=pend
            elif kd=='S':
                if turn[wi]<=0: continue
                turn[wi]-=1; w['t']=now+x['s']+20
            elif kd=='A':
                turn[(wi+1)%nw]+=1
            elif kd=='MUFU':
                if mufu>now: continue
                mufu=now+8
            elif kd in ALU:
                if alu>now: continue
                alu=now+2
            L=LAT.get(kd,12)
            if x['wr']!=7: w['sb'][x['wr']]=max(w['sb'][x['wr']],now+L)
            if x['rd']!=7: w['sb'][x['rd']]=max(w['sb'][x['rd']],now+12)
            w['t']=max(w['t'],now+x['s']) if kd=='S' else now+x['s']+(brk if kd=='B' and x['taken'] else 0)
            w['pc']+=1
            if w['pc']==len(prog): w['pc']=0; w['it']+=1; w['starts'].append(now)
            issued=True; rr=(wi+1)%nw; break
        now+=1
        if now>200000: print('stuck'); break
    st=W[0]['starts']; return (st[-1]-st[7])/(len(st)-8)
def progs():
    P={}
    t={0x22b0:True,0x25a0:False,0x3700:True,0x39b0:True,0x49b0:False,0x4af0:True}
    b=load('base.sass','ILi128'); P['base']=prep(path(b,0x2250,0x4af0,t),t)
    t={0x2650:False,0x37e0:True,0x37d0:False,0x3a90:True,0x4a50:False,0x4b90:True}
    a=load('ahead_t.sass','ILi128'); P['ahead_t']=prep(path(a,0x2410,0x4b90,t),t)
    t={0xbaf0:False,0xbb40:True,0xbe90:False,0xbee0:True,0xd8e0:True}
    f=load('fa3.sass'); P['fa3']=prep(path(f,0xba90,0xd8e0,t),t)
    for n,T,E in (('lean',{0x50f0:True,0x56d0:False,0x6280:False},0x63d0),):
        l=load(n+'.sass','ILi128'); P[n]=prep(path(l,0x4da0,E,T),T)
    return P
