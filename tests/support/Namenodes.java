import java.io.BufferedReader;
import java.io.InputStreamReader;
import org.apache.hadoop.hdfs.HdfsConfiguration;
import org.apache.hadoop.hdfs.MiniDFSCluster;
import org.apache.hadoop.hdfs.MiniDFSNNTopology;
import org.apache.hadoop.hdfs.server.namenode.NameNode;
import org.apache.hadoop.hdfs.server.namenode.NameNodeAdapter;

/** HDFS with two namenodes, both standbys at first. The argument is the folder of its data. It prints the ports of the first one (WebHDFS and
 * RPC), then does what each line of its input says, and answers with that line. */
public class Namenodes {
    public static void main(String[] arguments) throws Exception {
        HdfsConfiguration configuration = new HdfsConfiguration();
        configuration.set(MiniDFSCluster.HDFS_MINIDFS_BASEDIR, arguments[0]);
        MiniDFSNNTopology two = MiniDFSNNTopology.simpleHATopology();
        try (MiniDFSCluster cluster = new MiniDFSCluster.Builder(configuration).nnTopology(two).numDataNodes(1).build()) {
            NameNode first = cluster.getNameNode(0);
            System.out.println(first.getHttpAddress().getPort() + " " + cluster.getNameNodePort(0));
            BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
            for (String line = lines.readLine(); line != null; line = lines.readLine()) {
                switch (line) {
                    case "active" -> cluster.transitionToActive(0);
                    case "standby" -> cluster.transitionToStandby(0);
                    case "safe" -> NameNodeAdapter.enterSafeMode(first, false);
                    case "writable" -> NameNodeAdapter.leaveSafeMode(first);
                    default -> throw new IllegalArgumentException(line);
                }
                System.out.println(line);
            }
        }
    }
}
