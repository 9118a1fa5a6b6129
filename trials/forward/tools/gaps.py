import sys,re
n=sys.argv[1]; L=open(n+'.d').read().split('\n')
prev=None;out=[];cnt={}
for l in L:
    m=re.search(r' s(\d+)\s+(.*)',l)
    if not m: continue
    t=m.group(2); op=re.sub(r'^@!?U?P\w+\s+','',t).split()[0]
    k=op.split('.')[0]
    if k in('HGMMA','WARPGROUP','BRA','SYNCS','BAR') :
        out.append((sum(cnt.values()),cnt.get('MUFU',0),cnt.get('FMUL',0),cnt.get('FMNMX',0),t[:55])); cnt={}
    else: cnt[k]=cnt.get(k,0)+1
seen=0
for i,x in enumerate(out):
    if x[4].startswith('HGMMA.64x64') and i+1<len(out) and out[i+1][0]>12 and out[i+1][4].startswith('HGMMA'):
        for y in out[max(0,i-12):i+18]: print(y)
        break
